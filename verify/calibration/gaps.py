"""The mean of honest gaps, from the rollouts of a pool: what `verify.gap_noise` makes a budget of.

    mu = ROOM (mean + 3 standard errors + 7 cap / N)

over N tokens: those of the part of the run where that is largest, for rounding changes as the
policy does (by 1.6 within 20 updates that moved log-probs by 0.1, `docs/verify.md`). The standard
error is of rollouts, whose tokens may have more in common than others', and with the last term
what was seen nowhere has been missed with a chance of exp(-7). The cap is where most gaps end:
smaller ones lose what tells other weights from rounding, with larger ones a few tokens decide.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from verify.gap_noise import GapNoise

ROOM = 1.5
"""What versions and prompts that were not measured may have more, in means."""
SMALLEST_CAP = 1.0 / 32.0
"""In tau."""
PARTS = 8
"""Of a run, at most."""
LEAST_GAPS = 400
"""Of a part, where there are two: three standard errors then are a fifth of its mean."""
_CAP_QUANTILE = 0.9
_SIGMAS = 3.0
_UNSEEN = 7.0


def noise_of(
    gaps: Sequence[np.ndarray], *, tau: float, least: float, probability: float
) -> GapNoise:
    """The noise of a pool.

    Args:
        gaps: of each rollout f32 [n], nats, in the order of their versions; more than one
            rollout, none empty.
        tau: the largest cap.
        least: the least mean that is set, nats.
        probability: how often an honest submission, or an honest worker, may be rejected.
    """
    together = np.concatenate(gaps)
    above = together[together > 0.0]
    typical = float(np.quantile(above, _CAP_QUANTILE)) if len(above) else 0.0
    cap = float(f"{min(max(typical, SMALLEST_CAP * tau), tau):.3g}")
    sums = np.array([np.minimum(each, cap).sum(dtype=np.float64) for each in gaps])
    lengths = np.array([len(each) for each in gaps])
    parts = max(1, min(PARTS, len(above) // LEAST_GAPS, len(gaps) // 2))
    each_part = zip(np.array_split(sums, parts), np.array_split(lengths, parts), strict=True)
    upper = max(_upper(*part, cap) for part in each_part)
    return GapNoise(cap, max(least, ROOM * upper), probability)


def _upper(sums: np.ndarray, lengths: np.ndarray, cap: float) -> float:
    """What the mean of a token is at most, from f64 [R] sums over i64 [R] tokens."""
    tokens, rollouts = int(lengths.sum()), len(sums)
    mean = float(sums.sum()) / tokens
    squares = float(((sums - mean * lengths) ** 2).sum()) * rollouts / (rollouts - 1)
    return mean + (_SIGMAS * math.sqrt(squares) + _UNSEEN * cap) / tokens
