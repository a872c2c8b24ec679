"""Forged proofs against real chunks, each judged by all rules; three numbers a chunk are kept."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from benchmarks.null import forgeries
from benchmarks.null.forgeries import Guess, Library, TokenTable, ordered, selected
from benchmarks.null.text_model import CHUNKS_A_SEQUENCE, PROMPT
from verify.checks.prefill import judge_proofs, null_test_of
from verify.thresholds import BFLOAT16, NULL_BITS, Limits
from verify.toploc import CHUNK_ROWS, PRIME, TOP_K, build_proofs_batch
from verify.toploc.statistics import (
    GRANTED_CELLS,
    RADII,
    ChunkStatistics,
    NullTest,
    verify_proofs_batch,
)

BEFORE = 11
"""Tokens before a chunk that forgers look at: contexts of 12."""
LONGEST = (12, 8, 6, 5, 4, 3, 2, 1)
ANOTHERS_TABLE = "table of three tokens, another's"
GRANTED = "256 cells granted"
DECIDED, ACCEPTED, PUBLISHED, RATIO = 1, 2, 4, 8
FEW = 10
"""Forgeries that modulus, degree or width refuse meet a tenth of the windows."""
_REPLAYED = 2000


def chunks_of(hidden: np.ndarray, tokens: np.ndarray) -> Library:
    """From u16 [n, 224, D] and i32 [n, 256]."""
    width = hidden.shape[2]
    starts = PROMPT + CHUNK_ROWS * np.arange(CHUNKS_A_SEQUENCE)
    windows = np.stack([tokens[:, s - BEFORE : s + CHUNK_ROWS] for s in starts], axis=1)
    flat = windows.reshape(-1, BEFORE + CHUNK_ROWS)
    return Library(hidden.reshape(-1, CHUNK_ROWS, width), flat)


def compared(hidden: np.ndarray, proofs: Sequence[bytes]) -> Iterator[ChunkStatistics]:
    """Of u16 [N, n, D] against one proof each."""
    for found in verify_proofs_batch(list(hidden), [[p] for p in proofs]):
        assert isinstance(found, list), found
        yield from found


def published(s: ChunkStatistics) -> bool:
    """arXiv 2501.16007: signs are ignored."""
    return (
        s.exponent_mismatches <= 38 and s.mantissa_error_mean <= 10 and s.mantissa_error_median <= 8
    )


def with_ratio(s: ChunkStatistics) -> bool:
    """The rules before the null test."""
    return (
        s.exponent_mismatches + s.sign_mismatches <= 38
        and s.mantissa_error_mean <= 10
        and s.mantissa_error_median <= 8
        and s.error_median <= BFLOAT16.constant_ratio * s.constant_error
    )


@dataclass
class NullTests:
    """Null tests under some limits; they depend on little of a chunk, so that few are computed."""

    limits: Limits = BFLOAT16
    _known: dict[tuple, NullTest] = field(default_factory=dict)

    def of(self, s: ChunkStatistics) -> NullTest:
        key = (s.k, s.elements, s.guessable)
        if key not in self._known:
            self._known[key] = null_test_of(s, self.limits)
        return self._known[key]


def judged(found: Sequence[ChunkStatistics], tests: NullTests) -> np.ndarray:
    """i16 [N, 3]: positions hit, how many more were required, and flags."""
    rows = np.empty((len(found), 3), np.int16)
    for row, s in zip(rows, found, strict=True):
        test = tests.of(s)
        misses = s.misses[test.radius]
        told = test.bits >= NULL_BITS
        # a decided chunk with too many misses fails by that rule alone
        accepted = not (told and misses > test.allowed) and all(
            result.passed for result in judge_proofs([s], tests.limits)
        )
        flags = DECIDED * told + ACCEPTED * accepted
        flags += PUBLISHED * published(s) + RATIO * with_ratio(s)
        row[:] = s.k - misses, misses - test.allowed, flags
    return rows


class Forgers:
    """All that is made of a library beforehand."""

    def __init__(self, library: Library, others: Library) -> None:
        """`others` is of other text: what somebody else knows of the model."""
        found, width = selected(library.hidden), library.width
        self._few = {
            "constant": forgeries.constant(found, 64),
            "channels": forgeries.channels(found, width, 64),
            "channels, narrow": forgeries.channels(found, width, RADII[0]),
            "cells": forgeries.cells(found, 64),
        }
        self._cells = forgeries.cells(found, RADII[0])
        self._granted = [forgeries.likeliest(found, PRIME, GRANTED_CELLS, r) for r in RADII]
        self._replays = [p for [p] in build_proofs_batch(list(library.hidden[:_REPLAYED]))]
        self._tables = {
            "table of three tokens": TokenTable(library),
            "longest context met, up to 12": TokenTable(library, LONGEST),
            ANOTHERS_TABLE: TokenTable(others),
        }
        self._tests = NullTests()

    def against(self, real: Library, first: int) -> Iterator[tuple[str, np.ndarray]]:
        """Forgeries by name, i16 [windows, 7, 3] as `judged`, where the first window has a number.

        Those of `FEW` meet every tenth window: where there is none, an empty array.
        """
        count = len(real.hidden) // CHUNKS_A_SEQUENCE
        few = np.flatnonzero((first + np.arange(count)) % FEW == 0)
        tenth = real.hidden.reshape(count, CHUNKS_A_SEQUENCE, CHUNK_ROWS, -1)[few]
        tenth = tenth.reshape(-1, CHUNK_ROWS, real.width)
        for name, proof in self._few.items():
            yield name, self._judged(tenth, [proof] * len(tenth))[0]
        for name, table in self._tables.items():
            yield name, self._judged(real.hidden, table.proofs(real.tokens))[0]
        numbers = first * CHUNKS_A_SEQUENCE + np.arange(len(real.hidden))
        replays = [self._replays[n % len(self._replays)] for n in numbers]
        yield "replay", self._judged(real.hidden, replays)[0]
        rows, found = self._judged(real.hidden, [self._cells] * len(real.hidden))
        yield "cells, narrow", rows
        yield GRANTED, self._hits_granted(real, found)

    def _judged(
        self, hidden: np.ndarray, proofs: Sequence[bytes]
    ) -> tuple[np.ndarray, list[ChunkStatistics]]:
        found = list(compared(hidden, proofs))
        return judged(found, self._tests).reshape(-1, CHUNKS_A_SEQUENCE, 3), found

    def _hits_granted(self, real: Library, found: Sequence[ChunkStatistics]) -> np.ndarray:
        """Who hits 256 cells, more than any polynomial known: hits counted without a proof."""
        truth, size = selected(real.hidden), CHUNK_ROWS * real.width
        tests = [self._tests.of(s) for s in found]
        by_radius = np.stack(
            [_hits(guess, truth, size, r) for guess, r in zip(self._granted, RADII, strict=True)]
        )
        hits = by_radius[[test.radius for test in tests], np.arange(len(tests))]
        short = TOP_K - np.array([test.allowed for test in tests]) - hits
        told = np.array([test.bits >= NULL_BITS for test in tests])
        flags = DECIDED * told + ACCEPTED * (told & (short <= 0))
        rows = np.stack([hits, short, flags], axis=1).astype(np.int16)
        return rows.reshape(-1, CHUNKS_A_SEQUENCE, 3)


def _hits(guess: Guess, truth: forgeries.Selection, size: int, radius: int) -> np.ndarray:
    value = np.full(max(size, int(guess.residues.max()) + 1), 1 << 20)
    value[guess.residues] = guess.values
    return (np.abs(value[truth.indices] - ordered(truth.bits)) <= radius).sum(axis=1)
