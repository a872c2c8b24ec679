"""Lanes: Parquet. Its footer, the decoder's process, its answer, verdicts.

Tables are small (three of their columns' pages are most of a case's time), so that a case takes as
little as Arrow does.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import pyarrow as pa

from tests.fuzz import test_decoder, test_tables
from tests.fuzz.bounds import OPEN, bounded
from tests.fuzz.mutate import damaged
from tests.fuzz.pages import damaged_pages, paged
from tests.fuzz.tables import FOOTER_BYTES, VARINTS, made_up, written
from tests.fuzz.tables import damaged as damaged_file
from tests.fuzz.test_tables import KINDS, VERDICT, decoded
from verify.decoder import Decoder
from verify.formats.parquet_footer import MAGIC, MalformedFooter, read_row_groups

Case = Callable[[Random], bool]
_FILES = 40
_FOOTER_MEMORY = 64 << 20
_THRIFT = [
    *(*VARINTS, b"", b"\0", b"\x15", b"\x16", b"\x18", b"\x19", b"\x1c", b"\x2c", b"\x29", b"\x0d"),
    *(b"\xfc", b"\xf9", b"\x1c" * 40, b"\x19\x1c" * 40, b"\x19\xfc" + b"\xff" * 4 + b"\x0f"),
    *(
        b"\x11",
        b"\x12",
        b"\x13",
        b"\x17" + bytes(8),
        b"\x1a\x19",
        b"\x1b",
        b"\x18\x00",
        b"\x05\x02",
    ),
]


def parquet_footer() -> Case:
    """Footers of small files and of submissions, read in Python before Arrow sees them."""
    small = pa.table({"a": [1, 2, 3], "b": [[1], [], [2, 3]], "c": ["x", None, "z"]})
    tables = [small.select(["a"]), small.select(["a", "b"]), small]
    plain = {"store_schema": False, "write_statistics": False}
    files = [written(table, row_group_size=size, **plain) for table in tables for size in (2, 9)]
    files += [written(small), test_tables.KINDS[0].files[0]]
    footers = [file[-_footer_size(file) - FOOTER_BYTES : -FOOTER_BYTES] for file in files]
    weights = [16] * 2 * len(tables) + [4, 1]

    def case(rng: Random) -> bool:
        footer = rng.choices(footers, weights)[0]
        footer = damaged(rng, footer, footers, _THRIFT)
        length = rng.choice((len(footer),) * 8 + (0, 1, len(footer) + 1, 2**31, 2**32 - 1))
        data = MAGIC + footer + length.to_bytes(4, "little") + MAGIC
        with bounded(_FOOTER_MEMORY):
            try:
                groups = read_row_groups(data)
            except MalformedFooter as error:
                assert len(str(error)) < 200
                return False
        for group in groups:
            assert 0 <= group.rows <= 1 << 40 and 0 <= group.bytes <= 1 << 50
            assert all(0 <= chunk.values <= 1 << 40 for chunk in group.chunks)
        return True

    return case


def _footer_size(file: bytes) -> int:
    return int.from_bytes(file[-FOOTER_BYTES:-4], "little")


def parquet_pages() -> Case:
    """A submission's damaged pages, in the decoder's process."""
    decoder = _decoder()
    files = [paged(test_decoder.ROWS.slice(0, 2), Random(number)) for number in range(_FILES)]
    return lambda rng: test_decoder.checked(decoder, damaged_pages(rng.choice(files), rng))


def parquet_file() -> Case:
    """A submission's file with damage anywhere, likewise."""
    decoder = _decoder()
    files = [paged(test_decoder.ROWS.slice(0, 2), Random(number)).data for number in range(_FILES)]
    return lambda rng: test_decoder.checked(decoder, damaged_file(rng.choice(files), rng, files))


def _decoder() -> Decoder:
    decoder = Decoder(cpu_s=5, deadline_s=60.0)
    OPEN.callback(decoder.close)
    return decoder


def decoder_answer() -> Case:
    """What a decoder that was taken over says to its parent."""
    return lambda rng: test_decoder.believed(test_decoder.damaged_answer(rng))


def verdict_file() -> Case:
    """A validator's table."""
    return lambda rng: (
        decoded(VERDICT, damaged_file(rng.choice(VERDICT.files), rng, VERDICT.files)) is not None
    )


def fingerprints() -> Case:
    """Of a validator's table, as a restart reads them again."""
    folder = Path(OPEN.enter_context(TemporaryDirectory()))

    def case(rng: Random) -> bool:
        return test_tables.check_fingerprints(folder / "verdict.parquet", rng)

    return case


def grades() -> Case:
    """Of the rows of a validator's table."""

    def case(rng: Random) -> bool:
        dropped = [rng.randint(-1, 3) for _ in range(rng.choice((0, 0, 0, 1, 2)))]
        return test_tables.check_grades(rng, dropped)

    return case


def made_up_tables() -> Case:
    """Sound files of nearly the right columns."""

    def case(rng: Random) -> bool:
        kind = rng.choice(KINDS)
        return decoded(kind, made_up(kind.schema, rng)) is not None

    return case
