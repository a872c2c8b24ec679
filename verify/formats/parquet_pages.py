"""The pages of a Parquet file from outside: what they take once decompressed, before they are.

A page's header says it, and Arrow makes that room, whatever the footer says of the column.
"""

from __future__ import annotations

from collections.abc import Iterable

from verify.formats.parquet_footer import RowGroup
from verify.formats.thrift import MalformedThrift, Reader, count_of


class MalformedPages(ValueError):
    """Bytes that are not the pages of a Parquet file."""


def decompressed_bytes(data: bytes, groups: Iterable[RowGroup]) -> int:
    """What all pages of a file take together, decompressed.

    Args:
        data: the whole file.
        groups: of its footer.

    Raises:
        MalformedPages: a column chunk is not a row of pages.
    """
    reader, size = Reader(data, 0, 0), 0
    for chunk in (chunk for group in groups for chunk in group.chunks):
        if not chunk.values:  # nobody looks for pages then
            continue
        reader.at, reader.end = chunk.start, chunk.start + chunk.bytes
        if reader.end > len(data):
            raise MalformedPages("a column is longer than the file")
        try:
            while reader.at < reader.end:
                header = reader.struct()
                size += count_of(header, 2)
                reader.at += count_of(header, 3)
        except MalformedThrift as error:
            raise MalformedPages(f"of a page's header: {error}") from error
        if reader.at > reader.end:
            raise MalformedPages("a page is longer than its column")
    return size
