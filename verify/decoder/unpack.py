"""What the decoder's process answered, read as if an enemy had written it.

Nothing but slices and sums: the layout (`pack`) follows from the schema, and every length is
compared with the bytes that there are before anything is made of them. It costs no more than the
answer's size, whatever is in it.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa

from verify.decoder.pack import ROWS, most_pieces
from verify.formats.submission import SCHEMA, Rollout


class BadAnswer(ValueError):
    """Bytes that are not a table of submissions."""


def largest_answer(max_rows: int, max_bytes: int) -> int:
    """Bytes of the packed form of a table within these limits: the columns, and for each row and
    column a length or a flag more than Arrow counts."""
    return max_bytes + ROWS.size + 8 * len(SCHEMA) * (max_rows + 1)


def unpack(data: bytes | bytearray, *, max_rows: int) -> list[Rollout]:
    """The rows of an answer.

    Args:
        data: the answer; the arrays of the rows are views of it.
        max_rows: rows allowed.

    Raises:
        BadAnswer: anything else than what `pack` writes of at most `max_rows` rows.
    """
    reader = _Reader(data)
    rows = reader.count()
    if rows > max_rows:
        raise BadAnswer(f"{rows} rows, more than the {max_rows} allowed")
    columns = [_column(reader, field, rows) for field in SCHEMA]
    reader.end()
    names = SCHEMA.names
    return [Rollout(**dict(zip(names, row, strict=True))) for row in zip(*columns, strict=True)]


def _column(reader: _Reader, field: pa.Field, rows: int) -> list[Any]:
    """A value a row: numbers as Python's, lists of numbers as arrays, lists of bytes as lists."""
    flags = reader.flags(rows) if field.nullable else None
    values = _values(reader, field.type, rows)
    if flags is None:
        return values
    return [value if flag else None for value, flag in zip(values, flags, strict=True)]


def _values(reader: _Reader, kind: pa.DataType, count: int) -> list[Any]:
    if pa.types.is_string(kind):
        return [_text(value) for value in reader.pieces(count)]
    if not pa.types.is_list(kind):
        return reader.numbers(kind, count).tolist()
    ends = reader.ends(count)
    if pa.types.is_binary(kind.value_type):
        if ends[-1] > most_pieces(reader.size):
            raise BadAnswer(f"{ends[-1]} proofs")
        elements: Any = reader.pieces(int(ends[-1]))
    else:
        elements = reader.numbers(kind.value_type, int(ends[-1]))
    return [elements[start:end] for start, end in pairwise(ends.tolist())]


def _text(value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError as error:
        raise BadAnswer("a text that is not UTF-8") from error


class _Reader:
    """Takes parts off the front; each must be there as a whole."""

    def __init__(self, data: bytes | bytearray) -> None:
        self._data, self._at = memoryview(data), 0
        self.size = len(data)

    def count(self) -> int:
        return int(ROWS.unpack(self._take(ROWS.size))[0])

    def flags(self, count: int) -> list[int]:
        flags = np.frombuffer(self._take(count), np.uint8)
        if flags.max(initial=0) > 1:
            raise BadAnswer("a flag that is neither 0 nor 1")
        return flags.tolist()

    def numbers(self, kind: pa.DataType, count: int) -> np.ndarray:
        """i32 or f32 [count]."""
        dtype = np.float32 if pa.types.is_floating(kind) else np.int32
        return np.frombuffer(self._take(4 * count), dtype)

    def ends(self, count: int) -> np.ndarray:
        """i64 [count + 1]: where values of the lengths that come next start and end."""
        lengths = np.frombuffer(self._take(4 * count), np.int32)
        if lengths.min(initial=0) < 0:
            raise BadAnswer("a length below 0")
        return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])

    def pieces(self, count: int) -> list[bytes]:
        """Values of bytes."""
        ends = self.ends(count)
        data = bytes(self._take(int(ends[-1])))
        return [data[start:end] for start, end in pairwise(ends.tolist())]

    def end(self) -> None:
        if self._at != len(self._data):
            raise BadAnswer(f"{len(self._data) - self._at} bytes too many")

    def _take(self, size: int) -> memoryview:
        if size > len(self._data) - self._at:
            raise BadAnswer("ends within a column")
        taken = self._data[self._at : self._at + size]
        self._at += size
        return taken
