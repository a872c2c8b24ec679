"""Lane: encoded shares of islands. Finite vectors, or `MalformedShare`."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import get_args

import numpy as np

from bridge.codecs import Kind, MalformedShare, codec
from tests.fuzz.bounds import bounded
from tests.fuzz.mutate import damaged

MEMORY = 1 << 20
KINDS: tuple[Kind, ...] = get_args(Kind)
LENGTHS = (1, 129, 4096, 4500)
VALUES = np.random.default_rng(0).normal(size=max(LENGTHS)).astype(np.float32)
SOUND = {(kind, n): codec(kind).encode(VALUES[:n]) for kind in KINDS for n in LENGTHS}
_PIECES = [np.array([x], "<f4").tobytes() for x in (np.nan, np.inf, -np.inf, 3e38, -1, 1e-45, 0)]
_PIECES += [np.array([x], "<f2").tobytes() for x in (np.nan, np.inf, 65504)]


def share() -> Callable[[Random], bool]:
    """Return the case: damaged bytes of one kind, now and then as another kind or length."""

    def case(rng: Random) -> bool:
        of, target = rng.choice(list(SOUND)), rng.choice(list(SOUND))
        kind, n = target if rng.random() < 0.1 else of
        data = damaged(rng, SOUND[of], list(SOUND.values()), _PIECES)
        size = codec(kind).size(n)
        if rng.random() < 0.8:  # most with the right length, or no other check would be reached
            data = data[:size].ljust(size, b"\0")
        with bounded(MEMORY):
            try:
                x = codec(kind).decode(data, n)
            except MalformedShare:
                return False
        assert x.shape == (n,) and x.dtype == np.float32 and np.isfinite(x).all()
        assert len(data) == size
        return True

    return case
