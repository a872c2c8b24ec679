"""Parquet tables of an exact schema, written in memory and read with bounds."""

from __future__ import annotations

import io
from collections.abc import Collection
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from verify.formats.parquet_footer import RowGroup, read_row_groups

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
) -> pa.Table:
    """Reads Parquet bytes from outside.

    Args:
        data: the file's bytes.
        schema: must match exactly: names, order, types, nullability.
        max_rows: rows allowed.
        max_bytes: bytes allowed, of the file and of its decoded columns.
        newer: columns that files of older releases lack; they are read as nulls.

    Raises:
        MalformedTable: anything else than such a table.
    """
    if len(data) > max_bytes:
        raise MalformedTable(f"{len(data)} bytes, more than the {max_bytes} allowed")
    try:
        declared = sum(_declared_bytes(group) for group in read_row_groups(data))
        file = pq.ParquetFile(
            pa.BufferReader(data),
            thrift_string_size_limit=1 << 20,
            thrift_container_size_limit=1 << 16,
        )
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
        for batch in file.iter_batches(batch_size=64, use_threads=False):
            size += batch.nbytes
            if size > max_bytes:
                raise MalformedTable(f"decodes to more than the {max_bytes} bytes allowed")
            batches.append(batch.replace_schema_metadata(None))
        table = pa.Table.from_batches(batches, schema=expected)
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
    return max(group.bytes, _SMALLEST_VALUE * sum(group.values))
