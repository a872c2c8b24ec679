"""Parquet tables of an exact schema, written in memory and read with bounds."""

from __future__ import annotations

import io
from collections.abc import Collection, Iterator
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from verify.formats.parquet_footer import RowGroup, read_row_groups
from verify.formats.parquet_pages import decompressed_bytes

_SMALLEST_VALUE = 4  # bytes: i32 and f32; flags are fewer than would matter


class MalformedTable(ValueError):
    """Bytes that are not a table of the schema, within the limits."""


def encode_table(rows: list[dict[str, Any]], schema: pa.Schema) -> bytes:
    """Rows as the bytes of a Parquet file."""
    sink = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), sink, compression="zstd")
    return sink.getvalue()


def decode_table(
    data: bytes,
    schema: pa.Schema,
    *,
    max_rows: int,
    max_bytes: int,
    newer: Collection[str] = (),
    confined: bool = False,
) -> pa.Table:
    """Reads Parquet bytes from outside.

    Args:
        data: the file's bytes.
        schema: must match exactly: names, order, types, nullability.
        max_rows: rows allowed.
        max_bytes: bytes allowed, of the file and of its decoded columns.
        newer: columns that files of older releases lack; they are read as nulls.
        confined: the process has a limit of memory. Else texts may be plain or of a dictionary, and
            not in Parquet's other encodings, of which Arrow makes a plain column at once.

    Raises:
        MalformedTable: anything else than such a table.
    """
    if len(data) > max_bytes:
        raise MalformedTable(f"{len(data)} bytes, more than the {max_bytes} allowed")
    try:
        groups = read_row_groups(data)
        declared = max(sum(map(_declared_bytes, groups)), decompressed_bytes(data, groups))
        file = _open(data)
        found = file.schema_arrow.remove_metadata()
        lacking = set(newer) - set(found.names)
        expected = pa.schema([field for field in schema if field.name not in lacking])
        if not found.equals(expected):
            raise MalformedTable("the columns are not those of the format")
        meta = file.metadata
        if meta.num_rows > max_rows:
            raise MalformedTable(f"{meta.num_rows} rows, more than the {max_rows} allowed")
        if declared > max_bytes:
            raise MalformedTable(f"{declared} bytes decoded, more than the {max_bytes} allowed")
        batches, size = [], 0
        file = _open(data, metadata=meta, read_dictionary=None if confined else _texts(file))
        for batch in _batches(file):
            size += sum(map(_plain_bytes, batch.columns))
            if size > max_bytes:
                raise MalformedTable(f"decodes to more than the {max_bytes} bytes allowed")
            batches.append(batch.replace_schema_metadata(None))
        if sum(map(len, batches)) != meta.num_rows:  # Arrow ends with the shortest column
            raise MalformedTable("the columns have other rows than the file says")
        schema_read = file.schema_arrow.remove_metadata()
        table = pa.Table.from_batches(batches, schema=schema_read).cast(expected)
        for index, field in enumerate(schema):
            if field.name in lacking:
                table = table.add_column(index, field, pa.nulls(len(table), field.type))
        table.validate(full=True)
    except (pa.ArrowException, OSError, ValueError, OverflowError) as error:
        if isinstance(error, MalformedTable):
            raise
        raise MalformedTable(f"not a readable Parquet file: {str(error)[:200]}") from error
    return table


def _declared_bytes(group: RowGroup) -> int:
    """What a row group says it decodes to: runs of equal values are small in a file, not here."""
    return max(group.bytes, _SMALLEST_VALUE * sum(chunk.values for chunk in group.chunks))


def _open(data: bytes, **options: Any) -> pq.ParquetFile:
    return pq.ParquetFile(
        pa.BufferReader(data),
        thrift_string_size_limit=1 << 20,
        thrift_container_size_limit=1 << 16,
        **options,
    )


def _texts(file: pq.ParquetFile) -> list[str]:
    """The paths of columns of texts. They are read as numbers of a dictionary: one long text that a
    million rows name is a few bytes in the file, and would be many in a plain column."""
    columns = (file.schema.column(index) for index in range(len(file.schema)))
    return [column.path for column in columns if column.physical_type == "BYTE_ARRAY"]


def _batches(file: pq.ParquetFile) -> Iterator[pa.RecordBatch]:
    for group in range(file.num_row_groups):  # in one of two groups Arrow joins no dictionaries
        yield from file.iter_batches(batch_size=64, row_groups=[group], use_threads=False)


def _plain_bytes(array: pa.Array) -> int:
    """What an array takes when its texts are no numbers of a dictionary any more."""
    if pa.types.is_list(array.type):
        return array.offsets.nbytes + _plain_bytes(array.flatten())
    if pa.types.is_struct(array.type):
        return sum(map(_plain_bytes, array.flatten()))
    if pa.types.is_dictionary(array.type):
        lengths = pc.binary_length(array.dictionary).take(array.indices)
        return array.indices.nbytes + (pc.sum(lengths).as_py() or 0)
    return int(array.nbytes)
