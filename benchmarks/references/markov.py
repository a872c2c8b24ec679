"""An order-3 Markov source of bases, whose entropy is known.

Each context of three bases has the same four probabilities, in an order of its own. So the entropy
H(3) of a base after three others is that of the four numbers, whatever the contexts' frequencies.
A model that sees two bases needs H(2) bits, which is larger.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

BASES = "ACGT"
ORDER = 3
PROBABILITIES = (0.62, 0.22, 0.11, 0.05)
"""Of the next base after each context, in an order that the context says."""
LEAST_GAP = 0.2
"""Smallest H(2) - H(3), bits a base."""


@dataclass(frozen=True)
class MarkovSource:
    """Stationary source of documents of bases."""

    table: np.ndarray
    """float64 [64, 4]: probabilities of the next base, by the three before it."""

    @classmethod
    def drawn(cls, seed: int) -> MarkovSource:
        """Draw a source.

        Raises:
            ValueError: the draw has an H(2) - H(3) below `LEAST_GAP`.
        """
        rng = np.random.default_rng(seed)
        table = rng.permuted(np.tile(PROBABILITIES, (4**ORDER, 1)), axis=1)
        source = cls(table)
        if (gap := source.entropy(2) - source.entropy(3)) < LEAST_GAP:
            raise ValueError(f"seed {seed}: H(2) - H(3) is {gap:.3f} bits, not {LEAST_GAP}")
        return source

    def stationary(self) -> np.ndarray:
        """Return the probability of each three bases in a row, float64 [64]."""
        steps = np.zeros((4**ORDER, 4**ORDER))
        for context, base in np.ndindex(self.table.shape):
            steps[context, context % 4 ** (ORDER - 1) * 4 + base] = self.table[context, base]
        # p steps = p and sum p = 1, by least squares: 65 equations of rank 64.
        equations = np.vstack([steps.T - np.eye(4**ORDER), np.ones(4**ORDER)])
        return np.linalg.lstsq(equations, np.eye(4**ORDER + 1)[-1], rcond=None)[0]

    def entropy(self, order: int) -> float:
        """Return H(order): bits of a base to whoever knows the `order` bases before it, 0 to 3."""
        joint = (self.stationary()[:, None] * self.table).reshape(-1, 4**order, 4).sum(axis=0)
        given = joint / joint.sum(axis=1, keepdims=True)
        return float(-(joint * np.log2(given)).sum())

    def documents(self, count: int, length: int, seed: int) -> list[str]:
        """Sample documents of `length` bases, at least three, each from the stationary state."""
        rng = np.random.default_rng(seed)
        context = rng.choice(4**ORDER, count, p=self.stationary())
        bases = np.empty((count, length), np.int64)
        bases[:, :ORDER] = np.stack(np.unravel_index(context, (4,) * ORDER), axis=1)
        cumulative = self.table.cumsum(axis=1)[:, :-1]
        for place in range(ORDER, length):
            base = (rng.random(count)[:, None] > cumulative[context]).sum(axis=1)
            bases[:, place] = base
            context = context % 4 ** (ORDER - 1) * 4 + base
        letters = np.frombuffer(BASES.encode(), np.uint8)[bases]
        return [row.tobytes().decode() for row in letters]

    def bits(self, documents: Sequence[str]) -> float:
        """Return -log2 p of all the documents' bases; the first three have the stationary p.

        Args:
            documents: at least three bases each.
        """
        stationary, total = self.stationary(), 0.0
        for document in documents:
            bases = np.array([BASES.index(letter) for letter in document])
            contexts = 16 * bases[:-2] + 4 * bases[1:-1] + bases[2:]
            total -= np.log2(stationary[contexts[0]])
            total -= np.log2(self.table[contexts[:-1], bases[ORDER:]]).sum()
        return float(total)
