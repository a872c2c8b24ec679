"""A bound for every proof that is fixed before the output is known, however it was made.

Let f be any function of the chunk's cells that hits no more than 256 cells (`GRANTED_CELLS`), and
let it pass a share p of the decided chunks: at least m positions hit, each within the radius r of
its chunk's test. Two chunks A and B, drawn independently, both pass with p^2. Given that they do,
they agree, within r_A + r_B, wherever f hits both, and with P_c the chance that cell c is hit

    E[agreements] >= sum_c P_c^2 >= (sum_c P_c)^2 / 256 >= m^2 / 256       (Cauchy and Schwarz).

Agreements are at most 128, so that at least t come with (m^2 / 256 - t) / (128 - t) or more. So

    p <= sqrt(q_t (128 - t) / (m^2 / 256 - t)),  q_t = P(A and B agree in at least t cells),

for every t below m^2 / 256. q_t says nothing of a forger: it is measured on honest chunks alone.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from benchmarks.null.forgeries import ordered, selected
from benchmarks.null.judging import NullTests, compared
from benchmarks.null.summary import upper_bound
from verify.thresholds import NULL_BITS
from verify.toploc import TOP_K, build_proofs_batch
from verify.toploc.null import GRANTED_CELLS, RADII

_REFERENCES = 1000
_FEWEST = 20
_NOWHERE = 1 << 20


def bound(left: np.ndarray, right: np.ndarray) -> dict[str, Any]:
    """From u16 [N, 32, D] and u16 [M, 32, D], chunks of windows drawn at random.

    `pass_below` is of all pairs of a left and a right chunk, as they were measured;
    `pass_below_95` of pairs that share no chunk, with Clopper and Pearson's bound of q_t. Nothing
    where few chunks are decided.
    """
    one, other = _decided(left), _decided(right)
    if min(len(one[1]), len(other[1])) < _FEWEST:
        return {}
    counts = np.zeros(TOP_K + 1, np.int64)
    for chunk in range(min(_REFERENCES, len(one[1]))):
        counts += np.bincount(_agreements(one, chunk, other), minlength=TOP_K + 1)
    paired = range(min(len(one[1]), len(other[1])))
    single = np.array([_agreements(one, n, other, slice(n, n + 1))[0] for n in paired])
    least = int(min(one[3].min(), other[3].min()))
    shares = counts[::-1].cumsum()[::-1] / counts.sum()  # q_t
    rates = {t: _rate(shares[t], t, least) for t in range(1, math.ceil(least**2 / GRANTED_CELLS))}
    best = min(rates, key=rates.__getitem__)
    sure = upper_bound(int((single >= best).sum()), len(single))
    return {
        "pairs": int(counts.sum()),
        "agreements_mean": round(float(counts @ np.arange(TOP_K + 1)) / counts.sum(), 2),
        "required_least": least,
        "t": best,
        "q": f"{shares[best]:.1e}",
        "pass_below": f"{rates[best]:.1e}",
        "independent_pairs": len(single),
        "pass_below_95": f"{_rate(sure, best, least):.1e}",
    }


def _rate(share: float, t: int, least: int) -> float:
    return min(1.0, math.sqrt(share * (TOP_K - t) / (least**2 / GRANTED_CELLS - t)))


_Decided = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


def _decided(hidden: np.ndarray) -> _Decided:
    """Of the decided chunks: positions, values, radius and positions required."""
    found = selected(hidden)
    tests, proofs = NullTests(), [p for [p] in build_proofs_batch(list(hidden))]
    judged = [tests.of(s) for s in compared(hidden, proofs)]
    told = np.array([test.bits >= NULL_BITS for test in judged])
    radius = np.array([RADII[test.radius] for test in judged])
    required = TOP_K - np.array([test.allowed for test in judged])
    return found.indices[told], ordered(found.bits)[told], radius[told], required[told]


def _agreements(one: _Decided, chunk: int, other: _Decided, some: slice = slice(None)) -> Any:
    """i64 [M]: positions where a chunk and each of some others are large and near."""
    cells, values, radius, _ = (each[some] for each in other)
    table = np.full(max(int(cells.max()), int(one[0][chunk].max())) + 1, _NOWHERE)
    table[one[0][chunk]] = one[1][chunk]
    near = np.abs(table[cells] - values) <= (radius + one[2][chunk])[:, None]
    return near.sum(axis=1)
