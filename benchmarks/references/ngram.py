"""An n-gram over bytes with interpolated Kneser-Ney smoothing.

    NGram.fitted(documents).bits_per_byte(held_out)

The highest order counts n-grams; a lower one counts the different symbols seen before each. With
c the count of w after h, c(h) their sum, t(h) the number of different w after h, and D = n1 / (n1 +
2 n2) from the numbers of n-grams counted once and twice:

    p(w | h) = max(c - D, 0) / c(h) + D t(h) / c(h) p(w | shorter h)

The shortest context has p uniform below it (Chen and Goodman 1999, section 2.7, one discount an
order). Documents are apart: n - 1 boundaries stand before each, and one ends it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

BOUNDARY = 256
SYMBOLS = 257
"""Bytes and the boundary."""


@dataclass(frozen=True)
class _Counts:
    """Counts of one order: sorted codes, and values of the same index."""

    grams: np.ndarray
    counts: np.ndarray
    contexts: np.ndarray
    totals: np.ndarray
    kinds: np.ndarray
    discount: float

    @classmethod
    def of(cls, grams: np.ndarray, counts: np.ndarray) -> _Counts:
        contexts, first, kinds = np.unique(grams // SYMBOLS, return_index=True, return_counts=True)
        once, twice = (int((counts == n).sum()) for n in (1, 2))
        # Where nothing was seen once, nothing says how much is unseen.
        discount = once / (once + 2 * twice) if once else 0.5
        return cls(grams, counts, contexts, np.add.reduceat(counts, first), kinds, discount)

    def mixed(self, grams: np.ndarray, lower: np.ndarray) -> np.ndarray:
        """Return p of each gram, [N], from that of the order below."""
        count = _looked_up(self.grams, self.counts, grams)
        total = _looked_up(self.contexts, self.totals, grams // SYMBOLS)
        kinds = _looked_up(self.contexts, self.kinds, grams // SYMBOLS)
        own = np.maximum(count - self.discount, 0) + self.discount * kinds * lower
        return np.where(total > 0, own / np.maximum(total, 1), lower)


@dataclass(frozen=True)
class NGram:
    """A fitted model."""

    orders: tuple[_Counts, ...]
    """From order 1 to n."""

    @classmethod
    def fitted(cls, documents: Sequence[bytes], order: int = 5) -> NGram:
        """Count the documents.

        Args:
            documents: at least one.
            order: n, 1 to 7: symbols of an n-gram.
        """
        grams, counts = np.unique(_windows(documents, order), return_counts=True)
        orders = [_Counts.of(grams, counts)]
        for n in range(order - 1, 0, -1):
            grams, counts = np.unique(orders[0].grams % SYMBOLS**n, return_counts=True)
            orders.insert(0, _Counts.of(grams, counts))
        return cls(tuple(orders))

    def probabilities(self, documents: Sequence[bytes]) -> np.ndarray:
        """Return p of each byte and of each end, in order, float64 [bytes + documents]."""
        windows = _windows(documents, len(self.orders))
        p = np.full(len(windows), 1 / SYMBOLS)
        for n, order in enumerate(self.orders, start=1):
            p = order.mixed(windows % SYMBOLS**n, p)
        return p

    def bits_per_byte(self, documents: Sequence[bytes]) -> float:
        """Return -log2 p of the documents, ends included, for each of their bytes."""
        bits = -np.log2(self.probabilities(documents)).sum()
        return float(bits / sum(len(document) for document in documents))


def _windows(documents: Sequence[bytes], order: int) -> np.ndarray:
    """Return codes of the n symbols that end with each byte or end, int64 [bytes + documents]."""
    codes = []
    for document in documents:
        padded = np.full(len(document) + order, BOUNDARY, np.int64)
        padded[order - 1 : -1] = np.frombuffer(document, np.uint8)
        slices = [padded[i : i + len(document) + 1] for i in range(order)]
        codes.append(sum(s * SYMBOLS ** (order - 1 - i) for i, s in enumerate(slices)))
    return np.concatenate(codes)


def _looked_up(keys: np.ndarray, values: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Return the value of each wanted key, 0 where `keys`, which are sorted, lack it."""
    at = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[at] == wanted, values[at], 0)
