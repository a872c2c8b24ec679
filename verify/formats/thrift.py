"""Values of Thrift's compact protocol from bytes from outside, as far as Parquet has them."""

from __future__ import annotations

from typing import Any

_MAX_DEPTH = 16
_MAX_VALUES = 1 << 20
"""Numbers, texts and structures; a footer of 20 columns and 64 row groups has 60,000."""
_LARGEST = 1 << 40
"""Bytes and values that a count may name; each is compared with the caller's bounds after."""
_TRUE, _FALSE, _BYTE, _DOUBLE, _BINARY, _LIST, _SET, _STRUCT = 1, 2, 3, 7, 8, 9, 10, 12
_INTEGERS = (4, 5, 6)


class MalformedThrift(ValueError):
    """Bytes that are no structure of Thrift's, or lack what is asked for."""


class Reader:
    """Reads structures, of so many values in all.

    Args:
        data: the bytes.
        at: where the next one begins; moves on as one is read.
        end: where it must have ended.
    """

    def __init__(self, data: bytes, at: int, end: int) -> None:
        self._data, self.at, self.end = data, at, end
        self._left = _MAX_VALUES

    def struct(self, depth: int = 0) -> dict[int, Any]:
        """Fields by number.

        Raises:
            MalformedThrift: there is none, or it takes too many values.
        """
        if depth > _MAX_DEPTH:
            raise MalformedThrift("nested too deeply")
        fields: dict[int, Any] = {}
        number = 0
        while head := self._byte():
            number = number + (head >> 4) if head >> 4 else self._integer()
            if number in fields:
                raise MalformedThrift(f"field {number} comes twice")
            kind = head & 15
            fields[number] = kind == _TRUE if kind in (_TRUE, _FALSE) else self._value(kind, depth)
        return fields

    def _value(self, kind: int, depth: int) -> Any:
        self._left -= 1
        if self._left < 0:
            raise MalformedThrift("too many values")
        if kind in _INTEGERS:
            return self._integer()
        if kind in (_TRUE, _FALSE, _BYTE):  # in a list a truth value is a byte too
            return self._byte()
        if kind == _DOUBLE:
            return self._bytes(8)
        if kind == _BINARY:
            return self._bytes(self._number())
        if kind == _STRUCT:
            return self.struct(depth + 1)
        if kind in (_LIST, _SET):
            head = self._byte()
            count = head >> 4 if head >> 4 != 15 else self._number()
            if count > self._left:
                raise MalformedThrift("too many values")
            if depth > _MAX_DEPTH:
                raise MalformedThrift("nested too deeply")
            return [self._value(head & 15, depth + 1) for _ in range(count)]
        raise MalformedThrift(f"a value of unknown type {kind}")

    def _integer(self) -> int:
        number = self._number()
        return number >> 1 ^ -(number & 1)

    def _number(self) -> int:
        number = 0
        for shift in range(0, 70, 7):
            byte = self._byte()
            number |= (byte & 127) << shift
            if byte < 128:
                return number
        raise MalformedThrift("a number without an end")

    def _byte(self) -> int:
        return self._bytes(1)[0]

    def _bytes(self, count: int) -> bytes:
        end = self.at + count
        if end > self.end:
            raise MalformedThrift("ends within a value")
        found, self.at = self._data[self.at : end], end
        return found


def as_struct(value: Any) -> dict[int, Any]:
    if not isinstance(value, dict):
        raise MalformedThrift("a structure is missing")
    return value


def list_of(struct: dict[int, Any], field: int) -> list[Any]:
    value = struct.get(field)
    if not isinstance(value, list):
        raise MalformedThrift(f"field {field} is not a list")
    return value


def count_of(struct: dict[int, Any], field: int) -> int:
    """Bytes, rows or values: a natural number that sums of many fit in 64 bits."""
    value = struct.get(field)
    if type(value) is not int or not 0 <= value <= _LARGEST:
        raise MalformedThrift(f"field {field} is not a count")
    return value
