"""A submission's table as plain bytes: what the decoder's process answers (`unpack` reads them).

Little-endian and without padding: u32 rows, then the columns of the schema in order, each as

    [u8 flags, one a row: 1 where there is a value, 0 for a null]     only where nulls are allowed
    i32 or f32  the values, one a row; 0 for a null
    text, bytes i32 lengths, one a row; then all the bytes
    list        i32 lengths, one a row, 0 for a null; then the elements as a column without nulls

Lists of bytes (the proofs) become Python objects on the other side, each of which takes more than
an empty one's four bytes here: so there may be only so many of them (`most_pieces`).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from verify.formats.tables import MalformedTable

ROWS = struct.Struct("<I")
_PIECE_BYTES, _FREE_PIECES = 256, 1024


def most_pieces(size: int) -> int:
    """Elements of lists of bytes in so many bytes: a proof has 258, and a few may be shorter."""
    return _FREE_PIECES + size // _PIECE_BYTES


def pack(table: pa.Table) -> bytes:
    """The bytes of a table of `decode_table`.

    Raises:
        MalformedTable: a null where the schema allows none.
    """
    parts = [ROWS.pack(len(table))]
    for field, column in zip(table.schema, table.columns, strict=True):
        array = column.combine_chunks()
        if field.nullable:
            parts.append(np.asarray(array.is_valid()).astype(np.uint8).tobytes())
        elif array.null_count:
            raise MalformedTable(f"nulls in column {field.name}")
        parts += _values(array)
    return b"".join(parts)


def _values(array: pa.Array) -> Iterator[bytes]:
    if pa.types.is_list(array.type):
        yield _lengths(pc.list_value_length(array))
        elements = array.flatten()  # without those of nulls
        if elements.null_count:
            raise MalformedTable("nulls in a list")
        if pa.types.is_binary(elements.type) and len(elements) > most_pieces(elements.nbytes):
            raise MalformedTable(f"{len(elements)} proofs in {elements.nbytes} bytes")
        yield from _values(elements)
    elif pa.types.is_string(array.type) or pa.types.is_binary(array.type):
        yield _lengths(pc.binary_length(array))
        yield _all_bytes(array)
    else:
        yield array.fill_null(0).to_numpy(zero_copy_only=False).tobytes()


def _lengths(lengths: pa.Array) -> bytes:
    return lengths.fill_null(0).to_numpy(zero_copy_only=False).astype("<i4").tobytes()


def _all_bytes(array: pa.Array) -> bytes:
    """The bytes of all values, one after the other, of an array without nulls."""
    if not len(array):
        return b""
    _, offsets, data = array.buffers()
    ends = np.frombuffer(offsets, np.int32)[array.offset : array.offset + len(array) + 1]
    return b"" if data is None else data.slice(ends[0], ends[-1] - ends[0]).to_pybytes()
