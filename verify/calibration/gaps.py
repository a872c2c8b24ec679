"""The mean of honest gaps, from the groups of a pool: what `verify.gap_noise` makes a budget of.

    mu = ROOM (mean + 3 standard errors + 7 cap / N)

over N tokens: those of the part of the run where that is largest, for rounding changes as the
policy does (by 1.6 within 20 updates that moved log-probs by 0.1, `docs/verify.md`). The standard
error is of groups, whose tokens have a prompt in common, and with the last term what was seen
nowhere has been missed with a chance of exp(-7). Prompts differ: mu is raised until every group
that was measured would keep its budget by itself. The cap is where most gaps end: smaller ones lose
what tells other weights from rounding, with larger ones a few tokens decide.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from verify.gap_noise import GapNoise

ROOM = 1.5
"""What versions and prompts that were not measured may have more, in means."""
SMALLEST_CAP = 1.0 / 32.0
"""In tau."""
PARTS = 8
"""Of a run, at most."""
LEAST_GAPS = 400
"""Of a part, on average, where there are two: three standard errors then are a fifth of its
mean."""
_RAISE = 1.05
_CAP_QUANTILE = 0.9
_SIGMAS = 3.0
_UNSEEN = 7.0


def noise_of(
    gaps: Sequence[np.ndarray], *, tau: float, least: float, probability: float
) -> GapNoise:
    """The noise of a pool.

    Args:
        gaps: of each group f32 [n], nats, in the order of their versions; more than one group,
            none empty.
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
    noise = GapNoise(cap, max(least, ROOM * upper), probability)
    while noise.mean < cap and not _kept(noise, sums, lengths):
        noise = replace(noise, mean=_RAISE * noise.mean)
    return noise


def _kept(noise: GapNoise, sums: np.ndarray, lengths: np.ndarray) -> bool:
    """Whether every group keeps the budget of its tokens."""
    pairs = zip((sums / lengths).tolist(), lengths.tolist(), strict=True)
    return all(mean <= noise.largest_mean(tokens) for mean, tokens in pairs)


def _upper(sums: np.ndarray, lengths: np.ndarray, cap: float) -> float:
    """What the mean of a token is at most, from f64 [G] sums over i64 [G] tokens."""
    tokens, groups = int(lengths.sum()), len(sums)
    mean = float(sums.sum()) / tokens
    squares = float(((sums - mean * lengths) ** 2).sum()) * groups / (groups - 1)
    return mean + (_SIGMAS * math.sqrt(squares) + _UNSEEN * cap) / tokens
