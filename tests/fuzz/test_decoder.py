"""The files and the answer that the decoder's lanes damage are sound."""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator
from io import BytesIO

import pyarrow.parquet as pq
import pytest

from tests.fuzz.bounds import bounded
from tests.fuzz.pages import Paged, paged
from tests.fuzz.test_tables import MAX_BYTES, MAX_ROWS, check_row, submission_rows, table
from verify.decoder import Decoder
from verify.decoder.pack import pack
from verify.decoder.unpack import BadAnswer, largest_answer, unpack
from verify.formats.submission import SCHEMA, decode_rollouts
from verify.formats.tables import MalformedTable, decode_table

ROWS = table(submission_rows(), SCHEMA)
MEMORY = 64 * MAX_BYTES
KINDS = 40


@pytest.fixture(scope="module")
def decoder() -> Iterator[Decoder]:
    decoder = Decoder(cpu_s=5, deadline_s=60.0)
    yield decoder
    decoder.close()


@pytest.fixture(scope="module")
def files() -> list[Paged]:
    rng = random.Random(7)
    return [paged(ROWS, rng) for _ in range(KINDS)]


def checked(decoder: Decoder, data: bytes) -> bool:
    """Rows, or `MalformedTable`: whatever the file does, the parent lives, and soon goes on."""
    with bounded(MEMORY):
        try:
            rows = decoder.decode(data, max_rows=MAX_ROWS, max_bytes=MAX_BYTES)
        except MalformedTable as error:
            assert len(str(error)) < 2000
            return False
    assert len(rows) <= MAX_ROWS
    for row in rows:
        check_row(row)
    return True


def test_the_files_whose_pages_are_damaged_are_sound(decoder: Decoder, files: list[Paged]) -> None:
    expected = repr(decode_rollouts(files[0].data, max_rows=MAX_ROWS, max_bytes=MAX_BYTES))
    encodings = set()
    for file in files:
        rows = decoder.decode(file.data, max_rows=MAX_ROWS, max_bytes=MAX_BYTES)
        assert repr(rows) == expected
        group = pq.ParquetFile(BytesIO(file.data)).metadata.row_group(0)
        encodings |= {e for i in range(group.num_columns) for e in group.column(i).encodings}
    assert encodings >= {
        *("PLAIN", "RLE", "RLE_DICTIONARY", "DELTA_BINARY_PACKED", "DELTA_BYTE_ARRAY"),
        *("DELTA_LENGTH_BYTE_ARRAY", "BYTE_STREAM_SPLIT"),
    }


# --- the answer of a decoder that was taken over ------------------------------------------------

SOUND = paged(ROWS, random.Random(1)).data
ANSWER = pack(decode_table(SOUND, SCHEMA, max_rows=9, max_bytes=1 << 20))
NUMBERS = [0, 1, -1, 2, 40, 258, 2**31 - 1, -(2**31), 2**24]


def believed(data: bytes) -> bool:
    with bounded(MEMORY):
        try:
            rows = unpack(data, max_rows=MAX_ROWS)
        except BadAnswer as error:
            assert len(str(error)) < 200
            return False
    assert len(rows) <= MAX_ROWS
    for row in rows:
        check_row(row)
    return True


def test_the_answer_that_is_damaged_is_sound() -> None:
    expected = decode_rollouts(SOUND, max_rows=9, max_bytes=1 << 20)
    assert repr(unpack(ANSWER, max_rows=MAX_ROWS)) == repr(expected)
    assert len(ANSWER) <= largest_answer(len(expected), 1 << 14)


def damaged_answer(rng: random.Random) -> bytes:
    made = bytearray(ANSWER)
    for _ in range(rng.choice([1, 1, 2, 4])):
        at = rng.randrange(len(made) or 1)
        match rng.randrange(5):
            case 0:
                at -= at % 4
                made[at : at + 4] = struct.pack("<i", rng.choice(NUMBERS))
            case 1:
                made[at : at + 1] = rng.randbytes(1)
            case 2:
                del made[at : at + rng.randrange(1, 300)]
            case 3:
                made[at:at] = rng.randbytes(rng.randrange(1, 300))
            case _:
                made = made[: at + 1]
    return bytes(made)
