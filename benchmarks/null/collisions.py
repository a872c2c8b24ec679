"""A bound for every proof that is fixed before the output is known, however it was made.

Let f be any function of the chunk's cells that hits no more than 256 cells (`GRANTED_CELLS`), and
let it pass a share p of the decided chunks: at least m positions hit, each within the radius r of
its chunk's test. Two chunks A and B, drawn independently, both pass with p^2. Given that they do,
they agree, within r_A + r_B, wherever f hits both, and with P_c the chance that cell c is hit

    E[agreements] >= sum_c P_c^2 >= (sum_c P_c)^2 / 256 >= m^2 / 256       (Cauchy and Schwarz).

Agreements are at most 128, so that at least t come with (m^2 / 256 - t) / (128 - t) or more. So

    p <= sqrt(q_t (128 - t) / (m^2 / 256 - t)),  q_t = P(A and B agree in at least t cells),

for every t below m^2 / 256. q_t says nothing of a forger: it is measured on honest chunks alone.

The chunks of a window depend on each other, so that windows are the unit. m and t are fixed on one
half of them, by all pairs of chunks there; on the other half one decided chunk is drawn from each
window, and each enters one pair. Those pairs are independent, and Clopper and Pearson's bound of
q_t holds. `share of decided chunks` thereby means: of a random window, then a random one of its.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from benchmarks.null.forgeries import ordered, selected
from benchmarks.null.judging import NullTests, compared
from benchmarks.null.summary import upper_bound
from verify.thresholds import NULL_BITS
from verify.toploc import TOP_K, build_proofs_batch
from verify.toploc.statistics import GRANTED_CELLS, RADII

_PAIRED = 2000
_FEWEST = 20
_NOWHERE = 1 << 20


class _Decided(NamedTuple):
    """Of n decided chunks."""

    window: np.ndarray
    """i64 [n]: its number."""
    cells: np.ndarray
    """[n, 128]: of the largest activations."""
    values: np.ndarray
    """[n, 128]."""
    radius: np.ndarray
    """[n]."""
    required: np.ndarray
    """[n]: positions, to pass."""

    def some(self, chosen: Any) -> _Decided:
        return _Decided(*(column[chosen] for column in self))


def bound(left: np.ndarray, right: np.ndarray) -> dict[str, Any]:
    """From u16 [N, C, 32, D] and u16 [M, C, 32, D], the chunks of windows drawn at random.

    `pass_below` is of all pairs of chunks of the first half, as they were measured;
    `pass_below_95` of one pair for two windows of the second half, with Clopper and Pearson's bound
    of q_t, for chunks that require at least m. Nothing where few are decided.
    """
    half = min(len(left), len(right)) // 2
    one, other = (_decided(each[:half]) for each in (left, right))
    if min(len(one.cells), len(other.cells)) < _FEWEST:
        return {}
    counts = np.zeros(TOP_K + 1, np.int64)
    others = other.some(slice(_PAIRED))
    for chunk in range(min(_PAIRED, len(one.cells))):
        counts += np.bincount(_agreements(one, chunk, others), minlength=TOP_K + 1)
    least = int(min(one.required.min(), other.required.min()))
    shares = counts[::-1].cumsum()[::-1] / counts.sum()  # q_t
    rates = {t: _rate(shares[t], t, least) for t in range(1, math.ceil(least**2 / GRANTED_CELLS))}
    best = min(rates, key=rates.__getitem__)
    likely = {  # what the other half will say, if it is like this one
        t: _rate(upper_bound(round(shares[t] * half), half), t, least) for t in rates
    }
    fixed = min(likely, key=likely.__getitem__)
    pairs = _pairs(*(_decided(each[half : 2 * half]) for each in (left, right)), least)
    agree = int((pairs >= fixed).sum())
    return {
        "pairs": int(counts.sum()),
        "agreements_mean": round(float(counts @ np.arange(TOP_K + 1)) / counts.sum(), 2),
        "required_least": least,
        "t": best,
        "q": f"{shares[best]:.1e}",
        "pass_below": f"{rates[best]:.1e}",
        "t_95": fixed,
        "window_pairs": len(pairs),
        "window_pairs_agree": agree,
        "pass_below_95": f"{_rate(upper_bound(agree, len(pairs)), fixed, least):.1e}",
    }


def _pairs(one: _Decided, other: _Decided, least: int) -> np.ndarray:
    """Agreements of pairs that share no window: one chunk of each that requires `least` or more."""
    rng = np.random.default_rng(0)

    def drawn(found: _Decided) -> _Decided:
        order = rng.permutation(np.flatnonzero(found.required >= least))
        return found.some(order[np.unique(found.window[order], return_index=True)[1]])

    one, other = drawn(one), drawn(other)
    paired = range(min(len(one.cells), len(other.cells)))
    return np.array([_agreements(one, n, other.some([n]))[0] for n in paired], np.int64)


def _rate(share: float, t: int, least: int) -> float:
    return min(1.0, math.sqrt(share * (TOP_K - t) / (least**2 / GRANTED_CELLS - t)))


def _decided(windows: np.ndarray) -> _Decided:
    """Of u16 [N, C, 32, D]."""
    hidden = windows.reshape(-1, *windows.shape[2:])
    found = selected(hidden)
    tests, proofs = NullTests(), [p for [p] in build_proofs_batch(list(hidden))]
    judged = [tests.of(s) for s in compared(hidden, proofs)]
    told = np.flatnonzero([test.bits >= NULL_BITS for test in judged])
    radius = np.array([RADII[test.radius] for test in judged])
    required = TOP_K - np.array([test.allowed for test in judged])
    window = np.arange(len(hidden)) // windows.shape[1]
    return _Decided(window, found.indices, ordered(found.bits), radius, required).some(told)


def _agreements(one: _Decided, chunk: int, others: _Decided) -> Any:
    """i64 [M]: positions where a chunk and each of the others are large and near."""
    mine = one.cells[chunk]
    table = np.full(max(int(others.cells.max()), int(mine.max())) + 1, _NOWHERE)
    table[mine] = one.values[chunk]
    near = np.abs(table[others.cells] - others.values)
    return (near <= (others.radius + one.radius[chunk])[:, None]).sum(axis=1)
