"""The footer of a Parquet file from outside, read before Arrow reads it.

Arrow ends the whole process (an exception that C++ cannot hand to Python) on some footers whose row
groups lack what every writer writes. Those are found here, in plain Python: a footer is a structure
of Thrift's compact protocol, of which a few numbers are wanted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from verify.formats.thrift import MalformedThrift, Reader, as_struct, count_of, list_of

MAGIC = b"PAR1"
_TAIL = 8  # the footer's length, then the magic
_READ_PAST_THE_END = b"parquet-mr"
"""Of its old releases Arrow takes 100 bytes after a column for its pages too."""


class MalformedFooter(ValueError):
    """Bytes that are not the footer of a Parquet file."""


@dataclass(frozen=True)
class ColumnChunk:
    """What a column says of itself in a row group."""

    values: int
    """Nulls included."""
    start: int
    """Of its first page, in the file."""
    bytes: int
    """Of its pages, as they are in the file."""


@dataclass(frozen=True)
class RowGroup:
    """What a row group says of itself."""

    rows: int
    bytes: int
    """Decoded, of all columns."""
    chunks: tuple[ColumnChunk, ...]


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
    try:
        footer = Reader(data, start, end).struct()
        leaves = sum(not as_struct(element).get(5) for element in list_of(footer, 2))  # 5: children
        groups = [_row_group(as_struct(group), leaves) for group in list_of(footer, 4)]
        rows, writer = count_of(footer, 3), footer.get(6)
    except MalformedThrift as error:
        raise MalformedFooter(str(error)) from error
    if isinstance(writer, bytes) and _READ_PAST_THE_END in writer.lower():
        raise MalformedFooter("written by a library whose files are read past a column's end")
    if sum(group.rows for group in groups) != rows:
        raise MalformedFooter("the rows of the row groups are not those of the file")
    return groups


def _row_group(group: dict[int, Any], leaves: int) -> RowGroup:
    columns = [as_struct(as_struct(chunk).get(3)) for chunk in list_of(group, 1)]
    if len(columns) != leaves:
        raise MalformedFooter(f"{len(columns)} columns in a row group of {leaves}")
    size = max(count_of(group, 2), sum(count_of(column, 6) for column in columns))
    return RowGroup(count_of(group, 3), size, tuple(_chunk(column) for column in columns))


def _chunk(column: dict[int, Any]) -> ColumnChunk:
    start = count_of(column, 9)
    if column.get(11):  # a dictionary comes before the data, and where it is no page may say so
        start = min(start, count_of(column, 11))
    return ColumnChunk(count_of(column, 5), start, count_of(column, 7))
