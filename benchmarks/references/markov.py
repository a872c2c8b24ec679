"""What is known of an order-3 source of bases: its entropies, and the bits of its reads.

A source is its table, float64 [64, 4]: p(base | three bases before it), where the first of the
three counts 16, the second 4, the third 1. `learner_jax.corpus.sources` draws tables and reads.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

BASES = "ACGT"
ORDER = 3
CONTEXTS = 4**ORDER


def stationary(table: np.ndarray) -> np.ndarray:
    """Return the probability of each three bases in a row, float64 [64]."""
    steps = np.zeros((CONTEXTS, CONTEXTS))
    for context, base in np.ndindex(table.shape):
        steps[context, context % 16 * 4 + base] = table[context, base]
    # p steps = p and sum p = 1, by least squares: 65 equations of rank 64.
    equations = np.vstack([steps.T - np.eye(CONTEXTS), np.ones(CONTEXTS)])
    return np.linalg.lstsq(equations, np.eye(CONTEXTS + 1)[-1], rcond=None)[0]


def entropy(table: np.ndarray, order: int) -> float:
    """Return H(order): mean bits of a base if the `order` bases before it are known, 0 to 3."""
    joint = (stationary(table)[:, None] * table).reshape(-1, 4**order, 4).sum(axis=0)
    given = joint / joint.sum(axis=1, keepdims=True)
    return float(-(joint * np.log2(given)).sum())


def bits(table: np.ndarray, reads: Sequence[str]) -> float:
    """Return -log2 p of all bases of reads, three or more each; the first three are uniform."""
    total = 0.0
    for read in reads:
        bases = np.array([BASES.index(letter) for letter in read])
        contexts = 16 * bases[:-3] + 4 * bases[1:-2] + bases[2:-1]
        total += ORDER * 2 - np.log2(table[contexts, bases[ORDER:]]).sum()
    return float(total)
