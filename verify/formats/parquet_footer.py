"""The footer of a Parquet file from outside, read before Arrow reads it.

Arrow ends the whole process (an exception that C++ cannot hand to Python) on some footers whose row
groups lack what every writer writes. Those are found here, in plain Python: a footer is a structure
of Thrift's compact protocol, of which a few numbers are wanted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

MAGIC = b"PAR1"
_TAIL = 8  # the footer's length, then the magic
_MAX_DEPTH = 16
_MAX_VALUES = 1 << 20
"""Numbers, texts and structures in a footer; one of 20 columns and 64 row groups has 60,000."""
_TRUE, _FALSE, _BYTE, _DOUBLE, _BINARY, _LIST, _SET, _STRUCT = 1, 2, 3, 7, 8, 9, 10, 12
_INTEGERS = (4, 5, 6)
_LARGEST = 1 << 40
"""Bytes and values that a count may name; each is compared with the caller's bounds after."""


class MalformedFooter(ValueError):
    """Bytes that are not the footer of a Parquet file."""


@dataclass(frozen=True)
class RowGroup:
    """What a row group says of itself."""

    rows: int
    bytes: int
    """Decoded, of all columns."""
    values: tuple[int, ...]
    """Of each column, nulls included."""


def read_row_groups(data: bytes) -> list[RowGroup]:
    """The row groups that a file's footer declares.

    Args:
        data: the whole file.

    Raises:
        MalformedFooter: not such a footer, or a row group lacks a column's description.
    """
    if len(data) < 4 + _TAIL or data[:4] != MAGIC or data[-4:] != MAGIC:
        raise MalformedFooter("not a Parquet file")
    end = len(data) - _TAIL
    start = end - int.from_bytes(data[end : end + 4], "little")
    if start < len(MAGIC):
        raise MalformedFooter("the footer is longer than the file")
    footer = _Reader(data, start, end).struct(0)
    leaves = sum(not _struct(element).get(5) for element in _list(footer, 2))  # 5: its children
    groups = [_row_group(_struct(group), leaves) for group in _list(footer, 4)]
    if sum(group.rows for group in groups) != _count(footer, 3):
        raise MalformedFooter("the rows of the row groups are not those of the file")
    return groups


def _row_group(group: dict[int, Any], leaves: int) -> RowGroup:
    columns = [_struct(_struct(chunk).get(3)) for chunk in _list(group, 1)]
    if len(columns) != leaves:
        raise MalformedFooter(f"{len(columns)} columns in a row group of {leaves}")
    values = tuple(_count(column, 5) for column in columns)
    size = max(_count(group, 2), sum(_count(column, 6) for column in columns))
    return RowGroup(_count(group, 3), size, values)


def _struct(value: Any) -> dict[int, Any]:
    if not isinstance(value, dict):
        raise MalformedFooter("a structure is missing")
    return value


def _list(struct: dict[int, Any], field: int) -> list[Any]:
    value = struct.get(field)
    if not isinstance(value, list):
        raise MalformedFooter(f"field {field} is not a list")
    return value


def _count(struct: dict[int, Any], field: int) -> int:
    value = struct.get(field)
    if type(value) is not int or not 0 <= value <= _LARGEST:
        raise MalformedFooter(f"field {field} is not a count")
    return value


class _Reader:
    """Values of Thrift's compact protocol from bytes, as far as a footer has them."""

    def __init__(self, data: bytes, at: int, end: int) -> None:
        self._data, self._at, self._end = data, at, end
        self._left = _MAX_VALUES

    def struct(self, depth: int) -> dict[int, Any]:
        """Fields by number."""
        if depth > _MAX_DEPTH:
            raise MalformedFooter("nested too deeply")
        fields: dict[int, Any] = {}
        number = 0
        while head := self._byte():
            number = number + (head >> 4) if head >> 4 else self._integer()
            if number in fields:
                raise MalformedFooter(f"field {number} comes twice")
            kind = head & 15
            fields[number] = kind == _TRUE if kind in (_TRUE, _FALSE) else self._value(kind, depth)
        return fields

    def _value(self, kind: int, depth: int) -> Any:
        self._left -= 1
        if self._left < 0:
            raise MalformedFooter("too many values")
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
                raise MalformedFooter("too many values")
            if depth > _MAX_DEPTH:
                raise MalformedFooter("nested too deeply")
            return [self._value(head & 15, depth + 1) for _ in range(count)]
        raise MalformedFooter(f"a value of unknown type {kind}")

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
        raise MalformedFooter("a number without an end")

    def _byte(self) -> int:
        return self._bytes(1)[0]

    def _bytes(self, count: int) -> bytes:
        end = self._at + count
        if end > self._end:
            raise MalformedFooter("ends within a value")
        found, self._at = self._data[self._at : end], end
        return found
