"""Reads of random organisms: documents that follow from a few numbers, for runs without files.

An organism is a chain of order 3: each base depends on the three before it. Its table of 64
distributions over A, C, G and T is drawn from a Dirichlet distribution.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

ORDER = 3
BASES = np.frombuffer(b"ACGT", np.uint8)
CONCENTRATION = 0.5
"""Of the Dirichlet distribution. Over many organisms a base has 1.25 bits of entropy given the
three before it, and 0.48 more given two."""
_BLOCK = 1 << 12
"""Reads made at a time."""


class Read(NamedTuple):
    """A read of an organism."""

    name: str
    """`ORGANISM-NUMBER`."""
    text: str
    """Its bases."""


@dataclass(frozen=True)
class GeneratedReads:
    """Parameters of a source of kind `generated_reads`."""

    organisms: int = 8
    reads: int = 20_000
    length: int = 100
    """Bases of a read."""
    seed: int = 0

    @classmethod
    def of(cls, params: Mapping[str, object]) -> GeneratedReads:
        """Return what a source's `params` say, which the linter has checked."""
        return cls(**{key: int(str(value)) for key, value in params.items()})

    def tables(self) -> np.ndarray:
        """Return p(base | three bases before it) of each organism: float64 [organisms, 64, 4].

        The first of the three bases counts 16, the second 4, the third 1.
        """
        rng = np.random.default_rng(self.seed)
        return rng.dirichlet(np.full(len(BASES), CONCENTRATION), (self.organisms, 4**ORDER))

    def documents(self) -> Iterator[Read]:
        """Yield the reads, in order; the first three are uniform."""
        bounds = self.tables().cumsum(axis=-1)[..., :-1]
        for first in range(0, self.reads, _BLOCK):
            # A generator of its own for each block: a read does not depend on how many there are.
            rng = np.random.default_rng((self.seed, first))
            organisms = rng.integers(self.organisms, size=_BLOCK)
            bases = rng.integers(len(BASES), size=(max(self.length, ORDER), _BLOCK))
            draws = rng.random(bases.shape)
            for at in range(ORDER, self.length):
                context = 16 * bases[at - 3] + 4 * bases[at - 2] + bases[at - 1]
                bases[at] = (draws[at, :, None] > bounds[organisms, context]).sum(axis=-1)
            texts = BASES[bases[: self.length].T]
            for i in range(min(_BLOCK, self.reads - first)):
                yield Read(f"{organisms[i]}-{first + i}", texts[i].tobytes().decode())
