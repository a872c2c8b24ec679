"""Tables of a fixed schema as safetensors files, written in memory and read with limits.

A file is a valid safetensors file: 8 bytes with the header's length, the header (JSON), then flat
tensors without gaps. The header follows from the schema and a few counts, which are the first
tensor. So a reader parses no JSON: it reads the counts, builds the header that they give, and
compares the bytes. The decoded table takes at most a small multiple of the file's size.

A column has a tensor for each of its steps, and one for its values:

    valid    BOOL [n]      false where the row is null
    index    I32 [n]       which of the column's distinct values the row has
    offsets  I32 [n + 1]   where each row's list starts and ends among the elements
    text     I32 [n + 1]   the same for the bytes (UTF-8) of texts
    (none)   dtype [n] or [n, width]
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise
from math import prod
from typing import Any

import numpy as np

DTYPES: dict[str, np.dtype[Any]] = {
    "I64": np.dtype("<i8"),
    "F64": np.dtype("<f8"),
    "I32": np.dtype("<i4"),
    "F32": np.dtype("<f4"),
    "BOOL": np.dtype("?"),
    "U8": np.dtype("u1"),
}
"""Types of values by their names in safetensors, little-endian."""
_SIZES = ("index", "offsets", "text")
"""Steps that change the number of entries."""
_COUNTS = "counts"
_PARQUET = b"PAR1"


class MalformedTable(ValueError):
    """Raised for bytes that are not a table of the schema within the limits."""


@dataclass(frozen=True)
class Column:
    """A column of a schema, named as the field of the row that it fills."""

    name: str
    dtype: str
    """Dtype of the values, by its name in safetensors."""
    steps: tuple[str, ...] = ()
    """Steps from a row to its values, in this order."""
    width: int = 1
    """Values of an entry; more than 1 for byte strings of a fixed length."""
    most: int | None = None
    """Largest number of elements of a row's list; None: only the file's size limits it."""


@dataclass(frozen=True)
class Schema:
    """Columns of one kind of file."""

    kind: str
    """Name and version of the format, in the header of each file."""
    columns: tuple[Column, ...]

    @property
    def counts(self) -> int:
        """Number of counts in a file: one for the rows, and one for each step in `_SIZES`."""
        return 1 + sum(step in _SIZES for column in self.columns for step in column.steps)


def text(name: str, *steps: str, most: int | None = None) -> Column:
    """Return a column of texts; the file holds each distinct text once."""
    return Column(name, "U8", (*steps, "index", "text"), most=most)


def encode_table(columns: Mapping[str, Sequence[Any]], schema: Schema) -> bytes:
    """Return the bytes of a file with these columns.

    Args:
        columns: for each column a value a row, as `decode_table` returns them.
        schema: the columns.

    Raises:
        ValueError: the length of a byte string is not its column's width.
    """
    counts, parts = [len(columns[schema.columns[0].name])], {}
    for column in schema.columns:
        values: Any = columns[column.name]
        for step in column.steps:
            entries, values = _step_written(step, values, column)
            parts[f"{column.name}.{step}"] = np.asarray(entries, DTYPES[_dtype_of(step)]).tobytes()
            counts += [len(values)] * (step in _SIZES)
        parts[column.name] = _bytes_of(values, column)
    parts[_COUNTS] = np.array(counts, DTYPES["I64"]).tobytes()
    layout = _layout(schema, counts)
    return b"".join([layout.head, *(parts[name] for name in layout.tensors)])


def decode_table(
    data: bytes,
    schema: Schema,
    *,
    max_rows: int,
    max_bytes: int,
    only: Collection[str] | None = None,
) -> dict[str, list[Any]]:
    """Read an untrusted file.

    Args:
        data: bytes of the file; arrays in the result are read-only views of it.
        schema: the columns.
        max_rows: largest number of rows.
        max_bytes: largest size of the file, and of each column if no two rows shared a value.
        only: names of the columns to read; None for all.

    Returns:
        For each column a value a row: a number, text, list of byte strings or texts, or 1-D array;
        None for a null.

    Raises:
        MalformedTable: `data` is not such a table.
    """
    if len(data) > max_bytes:
        raise MalformedTable(f"{len(data)} bytes, more than the {max_bytes} allowed")
    layout = _checked_layout(data, schema, max_rows)
    return {
        column.name: _column(data, layout, column, max_bytes)
        for column in schema.columns
        if only is None or column.name in only
    }


@dataclass(frozen=True)
class _Layout:
    """Positions of all parts of a file."""

    head: bytes
    """Bytes before the first tensor."""
    tensors: Mapping[str, tuple[int, int]]
    """Start and end of each tensor, by name, in the order of the file."""


def _layout(schema: Schema, counts: Sequence[int]) -> _Layout:
    """Return the only layout of a file of the schema with these counts."""
    shapes: dict[str, tuple[str, list[int]]] = {_COUNTS: ("I64", [len(counts)])}
    left = iter(counts)
    rows = next(left)
    for column in schema.columns:
        entries = rows
        for step in column.steps:
            boundaries = entries + (step in ("offsets", "text"))
            shapes[f"{column.name}.{step}"] = (_dtype_of(step), [boundaries])
            entries = next(left) if step in _SIZES else entries
        shapes[column.name] = (column.dtype, [entries] + [column.width] * (column.width > 1))
    # Larger values first, so that every tensor is aligned.
    shapes = dict(sorted(shapes.items(), key=lambda item: -DTYPES[item[1][0]].itemsize))
    sizes = [DTYPES[dtype].itemsize * prod(shape) for dtype, shape in shapes.values()]
    bounds = dict(zip(shapes, pairwise(accumulate(sizes, initial=0)), strict=True))
    header = json.dumps(
        {"__metadata__": {"format": schema.kind}}
        | {
            name: {"dtype": dtype, "shape": shape, "data_offsets": bounds[name]}
            for name, (dtype, shape) in shapes.items()
        },
        separators=(",", ":"),
    ).encode()
    header += b" " * (-len(header) % 8)
    head = len(header).to_bytes(8, "little") + header
    return _Layout(head, {n: (len(head) + a, len(head) + b) for n, (a, b) in bounds.items()})


def _checked_layout(data: bytes, schema: Schema, max_rows: int) -> _Layout:
    """Return the layout that a file's counts give, and check header and size of the file.

    Raises:
        MalformedTable: they differ.
    """
    if data.startswith(_PARQUET):
        raise MalformedTable("a Parquet file of an older version: update the program that wrote it")
    start = 8 + int.from_bytes(data[:8], "little")
    if len(data) < start + 8 * schema.counts:
        raise MalformedTable("shorter than its header and its counts")
    counts = np.frombuffer(data, DTYPES["I64"], schema.counts, start).tolist()
    if not all(0 <= count <= len(data) for count in counts):
        raise MalformedTable("a count is negative or larger than the file")
    if counts[0] > max_rows:
        raise MalformedTable(f"{counts[0]} rows, more than the {max_rows} allowed")
    layout = _layout(schema, counts)
    if start != len(layout.head) or not data.startswith(layout.head):
        raise MalformedTable(f"the header is not that of a {schema.kind} file with its counts")
    end = max(end for _, end in layout.tensors.values())
    if len(data) != end:
        raise MalformedTable(f"{len(data)} bytes, its counts give {end}")
    return layout


def _column(data: bytes, layout: _Layout, column: Column, max_bytes: int) -> list[Any]:
    """Return a value a row, from the column's values back to the rows."""
    values: Any = _tensor(data, layout, column.name, column.dtype)
    if column.width > 1:
        raw = values.tobytes()
        values = [raw[at : at + column.width] for at in range(0, len(raw), column.width)]
    for step in reversed(column.steps):
        name = f"{column.name}.{step}"
        entries = _tensor(data, layout, name, _dtype_of(step))
        try:
            values = _step_read(step, entries, values, column)
            if step == "index" and (size := _size(values, column)) > max_bytes:
                raise ValueError(f"{size} bytes in all rows, more than the {max_bytes} allowed")
        except ValueError as error:  # a UnicodeDecodeError is one
            raise MalformedTable(f"{name}: {error}") from error
    return values.tolist() if isinstance(values, np.ndarray) else values


def _tensor(data: bytes, layout: _Layout, name: str, dtype: str) -> np.ndarray:
    """Return a flat view of one tensor; truth values must be 0 or 1."""
    start, end = layout.tensors[name]
    view = memoryview(data)[start:end]
    if dtype == "BOOL" and np.frombuffer(view, np.uint8).max(initial=0) > 1:
        raise MalformedTable(f"{name}: a truth value that is neither 0 nor 1")
    return np.frombuffer(view, DTYPES[dtype])


def _step_read(step: str, entries: np.ndarray, values: Any, column: Column) -> Any:
    """Return the values that a step leads to, one for each of its entries.

    Raises:
        ValueError: an entry has no value.
    """
    if step == "valid":
        values = values.tolist() if isinstance(values, np.ndarray) else values
        return [value if valid else None for valid, value in zip(entries, values, strict=True)]
    if step == "index":
        if len(values) > len(entries):
            raise ValueError(f"{len(values)} distinct values of {len(entries)}")
        if len(entries) and (entries.min() < 0 or entries.max() >= len(values)):
            raise ValueError(f"an entry outside 0 to {len(values) - 1}")
        return [values[entry] for entry in entries.tolist()]
    if entries[0] != 0 or entries[-1] != len(values) or (entries[1:] < entries[:-1]).any():
        raise ValueError(f"they do not lead from 0 to {len(values)}")
    bounds = pairwise(entries.tolist())
    if step == "text":
        raw = values.tobytes()
        return [raw[start:end].decode() for start, end in bounds]
    lists = [values[start:end] for start, end in bounds]
    if column.most is not None and (longest := max(map(len, lists), default=0)) > column.most:
        raise ValueError(f"{longest} elements of a row, more than the {column.most} allowed")
    return lists


def _step_written(step: str, values: Sequence[Any], column: Column) -> tuple[Any, Any]:
    """Return the entries of a step, and the values that they lead to."""
    if step == "valid":
        absent: Any = () if "offsets" in column.steps else 0
        return [v is not None for v in values], [absent if v is None else v for v in values]
    if step == "index":
        distinct: dict[Any, Any] = {}
        keys = [v if isinstance(v, str) else _bytes_of(v, column) for v in values]
        for key, value in zip(keys, values, strict=True):
            distinct.setdefault(key, value)
        positions = {key: position for position, key in enumerate(distinct)}
        return [positions[key] for key in keys], list(distinct.values())
    if step == "text":
        values = [value.encode() for value in values]
        joined: Any = b"".join(values)
    elif column.steps[-1] == "offsets" and column.width == 1:
        joined = np.concatenate([np.asarray(v, DTYPES[column.dtype]) for v in (*values, [])])
    else:
        joined = list(chain.from_iterable(values))
    return np.cumsum([0, *map(len, values)]), joined


def _size(values: Sequence[Any], column: Column) -> int:
    """Return the bytes of lists or texts if no two of them shared a value."""
    return sum(map(len, values)) * column.width * DTYPES[column.dtype].itemsize


def _bytes_of(values: Any, column: Column) -> bytes:
    """Return the bytes of values after the last step."""
    if isinstance(values, bytes):
        return values
    if column.width == 1:
        return np.asarray(values, DTYPES[column.dtype]).tobytes()
    if lengths := {len(value) for value in values} - {column.width}:
        raise ValueError(f"{column.name}: {lengths.pop()} bytes instead of {column.width}")
    return b"".join(values)


def _dtype_of(step: str) -> str:
    return "BOOL" if step == "valid" else "I32"
