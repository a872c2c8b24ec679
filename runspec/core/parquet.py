"""Parquet and Arrow data of strangers, read within bounds on what a row expands to.

A few kilobytes of Parquet can name one long text a billion times through a dictionary. So columns
of text stay encoded by their dictionaries, the size of each row is computed from them, and only
rows within the bound become Python objects.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from runspec.core.errors import UserError

MAX_GROUP_BYTES = 1024**3
"""Most uncompressed bytes of a row group, of the columns that are read."""
_TOGETHER_BYTES = 64 * 1024 * 1024
"""Bytes of rows that become Python objects at once; a larger row comes alone."""
_ROW_BYTES = 1024
"""Bytes that count for a row's Python objects beside what it holds."""
_FIXED_BYTES = 8
"""Most bytes of a number, and bytes that count for an element of a list."""

_TEXTS = (
    *(pa.types.is_string, pa.types.is_large_string),
    *(pa.types.is_binary, pa.types.is_large_binary),
)


def open_parquet(source: Path | BinaryIO, columns: Collection[str]) -> pq.ParquetFile:
    """Open a file; texts of the columns stay encoded by their dictionaries.

    Its methods have to be called with `use_threads=False`, if `source` is a Python file: a thread
    of Arrow's might release it while Python ends, which aborts the process.

    Raises:
        pa.ArrowException, OSError: it is not Parquet.
    """
    file = pq.ParquetFile(source, pre_buffer=False)
    leaves = [file.schema.column(i) for i in range(len(file.schema))]
    encoded = [
        leaf.path
        for leaf in leaves
        if leaf.physical_type == "BYTE_ARRAY"
        and leaf.converted_type != "DECIMAL"
        and root_of(leaf.path) in columns
    ]
    return pq.ParquetFile(source, metadata=file.metadata, read_dictionary=encoded, pre_buffer=False)


def root_of(path: str) -> str:
    """Return the column of a leaf such as `messages.list.element.role`."""
    return path.partition(".")[0]


def require_small_groups(file: pq.ParquetFile, columns: Collection[str], place: str) -> None:
    """Check that each row group, of these columns, may be read at once.

    Raises:
        UserError: one has more than `MAX_GROUP_BYTES`.
    """
    for number in range(file.metadata.num_row_groups):
        group = file.metadata.row_group(number)
        chunks = [group.column(i) for i in range(group.num_columns)]
        size = sum(
            max(chunk.total_uncompressed_size, chunk.num_values * _FIXED_BYTES)
            for chunk in chunks
            if root_of(chunk.path_in_schema) in columns
        )
        if size > MAX_GROUP_BYTES:
            raise UserError(
                f"row group {number} is {size} bytes, more than {MAX_GROUP_BYTES}",
                place=place,
                remedy="write the file with row groups of a thousand rows",
            )


def parquet_rows(
    file: pq.ParquetFile, columns: Sequence[str], *, most: int, place: str
) -> Iterator[list[Mapping[str, Any]]]:
    """Yield all rows of a file that `open_parquet` opened, one row group in memory.

    A group is read at once: Arrow would build the dictionary anew for each part of it.

    Raises:
        UserError: see `require_small_groups` and `bounded_rows`.
    """
    require_small_groups(file, columns, place)
    first = 0
    for number in range(file.num_row_groups):
        group = file.read_row_group(number, columns=list(columns), use_threads=False)
        yield from bounded_rows(group, most=most, place=place, first=first)
        first += len(group)


def bounded_rows(
    data: pa.RecordBatch | pa.Table, *, most: int, place: str, first: int = 0
) -> Iterator[list[Mapping[str, Any]]]:
    """Yield the rows as Python objects, some at a time.

    Args:
        data: rows of a few columns.
        most: most bytes of a row.
        place: file of the rows, for messages.
        first: number of the first row in the file, from 0.

    Raises:
        UserError: a row has more bytes.
    """
    batches = data.to_batches() if isinstance(data, pa.Table) else [data]
    for batch in batches:
        sizes = sum((row_bytes(column) for column in batch.columns), np.zeros(len(batch), np.int64))
        if (large := np.flatnonzero(sizes > most)).size:
            raise UserError(
                f"row {first + large[0] + 1} is {sizes[large[0]]} bytes, more than {most}",
                place=place,
                remedy="leave it out, or divide its text",
            )
        begin = 0
        while begin < len(batch):
            reach = np.cumsum(sizes[begin:] + _ROW_BYTES)
            count = max(1, int(np.searchsorted(reach, _TOGETHER_BYTES, side="right")))
            yield batch.slice(begin, count).to_pylist()
            begin += count
        first += len(batch)


def row_bytes(array: pa.Array) -> np.ndarray:
    """Return i64 [n]: the bytes of each element once every text is written out."""
    kind = array.type
    if pa.types.is_dictionary(kind):
        lengths = np.append(row_bytes(array.dictionary), 0)
        return lengths[pc.fill_null(array.indices.cast(pa.int64()), len(lengths) - 1).to_numpy()]
    if pa.types.is_struct(kind):
        parts = map(row_bytes, array.flatten())
        return sum(parts, np.zeros(len(array), np.int64))
    if pa.types.is_map(kind):
        array = array.cast(pa.list_(pa.struct([kind.key_field, kind.item_field])))
    if pa.types.is_nested(array.type):
        counts = pc.fill_null(pc.list_value_length(array), 0).to_numpy().astype(np.int64)
        reach = np.append(0, np.cumsum(row_bytes(array.flatten())))
        ends = np.cumsum(counts)
        return reach[ends] - reach[ends - counts] + _FIXED_BYTES * counts
    if pa.types.is_fixed_size_binary(kind):
        return np.full(len(array), kind.byte_width, np.int64)
    if any(of(kind) for of in _TEXTS):
        return pc.fill_null(pc.binary_length(array), 0).to_numpy().astype(np.int64)
    return np.full(len(array), _FIXED_BYTES, np.int64)
