"""Rows of JSON Lines, Parquet and Arrow files of strangers, within bounds on what a row expands to.

Every row knows its place, `FILE:LINE` or `FILE, row N`, which errors name. A few kilobytes of
Parquet can name one long text a billion times through a dictionary. So columns of text stay encoded
by their dictionaries, the size of each row is computed from them, and only rows within the bound
become Python objects.
"""

from __future__ import annotations

import gzip
import json
import zlib
from codecs import BOM_UTF8
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

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


class Row(NamedTuple):
    """A row of a file."""

    number: int
    """Of the line or row, from 1."""
    place: str
    """File and line or row, for messages."""
    columns: Mapping[str, Any]
    at: int
    """Where it is found again: first byte of its line, or `GROUP_BITS` of its place in its row
    group or batch below the number of that."""


GROUP_BITS = 32


@contextmanager
def readable(place: str, form: str) -> Iterator[None]:
    """Raise what reading raises as an error that names the file.

    Args:
        place: the file.
        form: what the file should be, for example `Parquet`.
    """
    try:
        yield
    except (pa.ArrowException, UnicodeDecodeError, OSError) as error:
        system = error.strerror if isinstance(error, OSError) else None
        raise UserError(
            f"cannot read: {system}" if system else f"cannot be read as {form}: {error}",
            place=place,
            remedy="name files of this kind, which exist and may be read, or fetch it again",
        ) from error


def lines(stream: BinaryIO, place: str, most: int) -> Iterator[tuple[int, int, bytes]]:
    """Yield number, from 1, first byte and bytes of each line, without its end and without the byte
    order mark that editors put before the first.

    Raises:
        UserError: a line has more than `most` bytes, or a compressed file is damaged.
    """
    number = begin = 0
    try:
        while line := stream.readline(most + 1):
            number += 1
            if len(line) > most:
                raise too_long(f"{place}:{number}", most)
            yield number, begin, (line if begin else line.removeprefix(BOM_UTF8)).rstrip(b"\r\n")
            begin += len(line)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise UserError(
            f"damaged gzip after line {number}: {error}",
            place=place,
            remedy="copy the file again; `gzip -t` tests it",
        ) from error


def too_long(place: str, most: int) -> UserError:
    """Return the error of a line or document over the limit."""
    return UserError(
        f"more than {most} bytes", place=place, remedy="leave it out, or divide its text"
    )


def json_rows(stream: BinaryIO, place: str, most: int) -> Iterator[Row]:
    """Yield the object of each JSON line; blank lines are left out.

    Raises:
        UserError: a line is no JSON object, or has more than `most` bytes.
    """
    for number, begin, line in lines(stream, place, most):
        if line.strip():
            row = f"{place}:{number}"
            yield Row(number, row, json_object(line, row), begin)


def json_object(line: bytes, place: str) -> dict[str, Any]:
    """Return the object of a JSON line.

    Raises:
        UserError: it is none.
    """
    try:
        row = json.loads(line.removeprefix(BOM_UTF8).decode())
        if not isinstance(row, dict):
            raise ValueError(f"it is of type {type(row).__name__}")
    except (ValueError, RecursionError) as error:
        raise UserError(
            f"not a JSON object: {error}", place=place, remedy="write one object a line"
        ) from error
    return row


def table_rows(
    groups: Iterator[tuple[int, pa.Table | pa.RecordBatch]], place: str, most: int
) -> Iterator[Row]:
    """Yield the rows of numbered row groups or batches, each of at most `most` bytes.

    Raises:
        UserError: a row has more.
    """
    number = 0
    for group, data in groups:
        at = group << GROUP_BITS
        for rows in bounded_rows(data, most=most, place=place, first=number):
            for columns in rows:
                number += 1
                yield Row(number, f"{place}, row {number}", columns, at)
                at += 1


def parquet_groups(
    source: Path | BinaryIO,
    columns: Sequence[str],
    place: str,
    *,
    optional: Sequence[str] = (),
    start: int = 0,
) -> Iterator[tuple[int, pa.Table]]:
    """Yield number and columns of each row group; one is in memory at a time.

    Arrow would build the dictionary of texts anew for each part of a group, so it is read at once.

    Args:
        source: a file.
        columns: are read.
        place: the file, for messages.
        optional: are read if the file has them.
        start: the first group to read.

    Raises:
        UserError: a column is missing, or see `require_small_groups`.
        pa.ArrowException, OSError: it is not Parquet.
    """
    file = open_parquet(source, {*columns, *optional})
    there = file.schema_arrow.names
    require_columns(columns, there, place)
    wanted = [name for name in dict.fromkeys((*columns, *optional)) if name in there]
    require_small_groups(file, wanted, place)
    for number in range(start, file.num_row_groups):
        yield number, file.read_row_group(number, columns=wanted, use_threads=False)


def arrow_batches(
    path: Path, columns: Sequence[str], place: str, *, start: int = 0
) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Yield number and columns of each record batch of an Arrow IPC stream, in mapped memory.

    Args:
        path: the file.
        columns: are read.
        place: the file, for messages.
        start: the first batch to give.

    Raises:
        UserError: a column is missing.
        pa.ArrowException, OSError: it is no such stream.
    """
    # Not closed, because the batches are in this mapping, which needs no open file.
    reader = pa.ipc.open_stream(pa.memory_map(str(path)))
    require_columns(columns, reader.schema.names, place)
    for number, batch in enumerate(reader):
        if number >= start:
            batch.validate()
            yield number, batch.select(columns)


def require_columns(columns: Sequence[str], there: Sequence[str], place: str) -> None:
    """Check that a file has the columns that are read.

    Raises:
        UserError: a column is missing.
    """
    if missing := [column for column in columns if column not in there]:
        raise UserError(
            f"no column {', '.join(map(repr, missing))}; there are {', '.join(there)[:300]}",
            place=place,
            remedy="name the right columns: under params of the source, or with --column",
        )
