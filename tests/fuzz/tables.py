"""Parquet files from outside: valid ones with damage, and tables of nearly the right columns."""

from __future__ import annotations

import io
import random
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

VARINTS = [
    *(b"\x00", b"\x01", b"\x02", b"\x7f", b"\xff\x01", b"\x80\x80\x04", b"\xfe\xff\xff\xff\x0f"),
    *(b"\xff\xff\xff\xff\x0f", b"\x80\x80\x80\x80\x08", b"\xff" * 9 + b"\x01", b"\x80" * 12),
]
"""Numbers as Parquet's headers hold them: small, 2**31, -2**31, 2**63, and one without an end."""
FOOTER_BYTES = 8  # the footer's length and b"PAR1"


def written(table: pa.Table, **options: Any) -> bytes:
    sink = io.BytesIO()
    pq.write_table(table, sink, **options)
    return sink.getvalue()


def variants(table: pa.Table) -> list[bytes]:
    """The same table as other writers would write it."""
    options: list[dict[str, Any]] = [
        {"compression": "zstd"},
        {"compression": "none", "use_dictionary": False},
        {"compression": "snappy", "data_page_version": "2.0", "row_group_size": 1},
        {"compression": "gzip", "data_page_size": 16, "write_statistics": False},
        {"compression": "brotli", "version": "1.0", "write_page_index": True},
        {"compression": "lz4", "write_page_checksum": True},
    ]
    return [written(table, **each) for each in options]


def damaged(data: bytes, rng: random.Random, others: Sequence[bytes]) -> bytes:
    """A few changes: flips, cuts, numbers of the headers, pieces of other files."""
    made = bytearray(data)
    footer = int.from_bytes(data[-FOOTER_BYTES:-4], "little") + FOOTER_BYTES
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(made) + 1)
        if rng.random() < 0.4:
            at = max(0, len(made) - 1 - rng.randrange(footer))
        to = min(len(made), at + rng.randrange(1, 12))
        other = rng.choice(others)
        start = rng.randrange(len(other))
        match rng.randrange(5):
            case 0:
                made[at : at + 1] = bytes(
                    byte ^ 1 << rng.randrange(8) for byte in made[at : at + 1]
                )
            case 1:
                number = rng.choice(VARINTS)
                made[at : at + len(number)] = number
            case 2:
                made[at:to] = rng.randbytes(rng.randrange(8))
            case 3:
                made[at:to] = other[start : start + rng.randrange(60)]
            case _:
                made[at:to] = made[at:to] * rng.randrange(3)
    if rng.random() < 0.5:  # so that the footer is still found where its length says
        made = made[:-FOOTER_BYTES] + data[-FOOTER_BYTES:]
    return bytes(made)


def _value(kind: pa.DataType, rng: random.Random) -> Any:
    """Something of the type, of the kinds that a check might not think of."""
    if pa.types.is_list(kind):
        return [_value(kind.value_type, rng) for _ in range(rng.choice([0, 1, 2, 7, 40]))]
    if pa.types.is_struct(kind):
        return {field.name: _value(field.type, rng) for field in kind}
    if pa.types.is_string(kind):
        return rng.choice(["", "x", "ab" * 32, "\x00", "../../x", "é" * 500])
    if pa.types.is_binary(kind):
        return rng.choice([b"", bytes(258), rng.randbytes(258), bytes(5000)])
    if pa.types.is_boolean(kind):
        return rng.random() < 0.5
    if pa.types.is_floating(kind):
        return rng.choice([0.0, -0.0, 1.5, float("nan"), float("inf"), float("-inf"), 3e38])
    bits = kind.bit_width - 1
    return rng.choice([0, 1, 5, -1, 2**bits - 1, -(2**bits), rng.randrange(2**15)])


def made_up(schema: pa.Schema, rng: random.Random) -> bytes:
    """A sound file of the schema, or nearly: a column more, less, twice, of another name, type."""
    fields = list(schema)
    for _ in range(rng.choice([0, 0, 0, 1, 2])):
        at = rng.randrange(len(fields))
        field = fields[at]
        match rng.randrange(7):
            case 0:
                del fields[at]
            case 1:
                fields.insert(at, field)
            case 2:
                fields[at] = field.with_name(rng.choice(["x", "", "run", field.name.upper()]))
            case 3:
                fields[at] = field.with_nullable(not field.nullable)
            case 4:
                others = [pa.int64(), pa.string(), pa.list_(field.type), pa.struct([field])]
                fields[at] = field.with_type(rng.choice(others))
            case 5:
                fields[at] = field.with_metadata({"PARQUET:field_id": "7", "x": "y" * 300})
            case _:
                fields[at], fields[0] = fields[0], fields[at]
    rows = rng.choice([0, 1, 2, 5])
    arrays = [
        pa.array(
            [
                None if field.nullable and rng.random() < 0.3 else _value(field.type, rng)
                for _ in range(rows)
            ],
            type=field.type,
        )
        for field in fields
    ]
    table = pa.Table.from_arrays(arrays, schema=pa.schema(fields, metadata={"a": "b"}))
    return written(table, compression=rng.choice(["zstd", "none", "snappy"]))
