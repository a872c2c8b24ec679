"""Parquet whose footer is sound and whose pages are not: every encoding, codec and kind of page."""

from __future__ import annotations

import random
from dataclasses import dataclass
from io import BytesIO
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tests.fuzz.tables import FOOTER_BYTES, VARINTS, written

_ENCODINGS = {
    "int": ["PLAIN", "DELTA_BINARY_PACKED", "BYTE_STREAM_SPLIT"],
    "float": ["PLAIN", "BYTE_STREAM_SPLIT"],
    "bytes": ["PLAIN", "DELTA_LENGTH_BYTE_ARRAY", "DELTA_BYTE_ARRAY"],
}
_CODECS = ["none", "none", "snappy", "gzip", "zstd", "lz4", "brotli"]
"""Twice without one: damage then reaches the decoders of values, not those of compression."""
_HEADER_BYTES = 40


@dataclass(frozen=True)
class Paged:
    """A sound file, and where its pages are."""

    data: bytes
    headers: list[int]
    """Offsets of each column chunk's first page headers."""
    end: int
    """Where the footer begins."""


def paged(table: pa.Table, rng: random.Random) -> Paged:
    """The table as one of many writers would write it."""
    dictionary = rng.random() < 0.4
    options: dict[str, Any] = {
        "compression": rng.choice(_CODECS),
        "data_page_version": rng.choice(["1.0", "2.0"]),
        "data_page_size": rng.choice([16, 200, 1 << 20]) if dictionary else 1 << 20,
        "row_group_size": rng.choice([1, 3, 1 << 20]),
        "write_statistics": rng.random() < 0.5,
        "use_dictionary": dictionary,
    }
    if not dictionary:  # of lists so encoded pyarrow 26 loses rows where their pages are small
        options["column_encoding"] = _encodings(table.schema, rng)
    data = written(table, **options)
    meta = pq.ParquetFile(BytesIO(data)).metadata
    headers = set()
    for group in range(meta.num_row_groups):
        for column in range(meta.num_columns):
            chunk = meta.row_group(group).column(column)
            headers |= {chunk.data_page_offset, chunk.dictionary_page_offset or 4}
    end = len(data) - FOOTER_BYTES - int.from_bytes(data[-FOOTER_BYTES:-4], "little")
    return Paged(data, sorted(headers), end)


def _encodings(schema: pa.Schema, rng: random.Random) -> dict[str, str]:
    """An encoding for each leaf, by its path."""
    chosen = {}
    for field in schema:
        path, kind = field.name, field.type
        if pa.types.is_list(kind):
            path, kind = f"{path}.list.element", kind.value_type
        name = "int" if pa.types.is_integer(kind) else "float"
        name = name if pa.types.is_primitive(kind) else "bytes"
        chosen[path] = rng.choice(_ENCODINGS[name])
    return chosen


def damaged_pages(file: Paged, rng: random.Random) -> bytes:
    """Changes in pages and their headers; the footer, the length and all offsets stay."""
    made = bytearray(file.data)
    for _ in range(rng.choice([1, 1, 2, 3, 8])):
        at = rng.randrange(4, file.end)
        if rng.random() < 0.6:
            at = min(file.end - 1, rng.choice(file.headers) + rng.randrange(_HEADER_BYTES))
        match rng.randrange(5):
            case 0:
                piece = bytes([made[at] ^ 1 << rng.randrange(8)])
            case 1:
                piece = rng.choice(VARINTS)
            case 2:
                piece = rng.randbytes(rng.randrange(1, 8))
            case 3:
                piece = bytes([rng.choice([0, 1, 2, 3, 127, 128, 254, 255])]) * rng.randrange(1, 9)
            case _:
                start = rng.randrange(4, file.end)
                piece = file.data[start : min(file.end, start + rng.randrange(1, 60))]
        piece = piece[: file.end - at]
        made[at : at + len(piece)] = piece
    return bytes(made)
