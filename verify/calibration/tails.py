"""Bounds a number of honest rollouts in a tail that the samples do not reach.

A false-rejection rate of 1e-6 cannot be counted in a thousand rollouts, so it is extrapolated.
Above the m-th largest of n values, u, the excess is assumed to be exponential (geometric for
counts). Its mean is the largest that m such excesses allow at 95 %, and its share is two sigmas
above the measured one:

    P(X > x) <= q exp(-(x - u) / scale),   q = (m + 2 sqrt m) / n,   bound = u + scale ln(q / p)

If the density is log-concave beyond u (normal, gamma, exponential, binomial, and means of many
such) the mean excess falls with u, so the bound is rather too large than too small. If the tail is
heavier, the excesses vary more than their mean (residual coefficient of variation, del Castillo,
Daoudi and Lockhart 2014), and there is no bound.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from verify.thresholds import root

MIN_SAMPLES = 40
"""Fewest samples from which a tail can be estimated."""
FURTHEST = 14.0
"""A bound is at most exp(14), a million, times rarer than the rarest sample."""
_LEAST_EXCESSES = 20
_EXCESS_SHARE = 0.02
_CONFIDENCE = 0.95
_SPREAD_SIGMAS = 3.0
_HALVINGS = 60


@dataclass(frozen=True)
class Bound:
    """Upper bound of one number."""

    value: float | None
    """An honest value exceeds it with a probability of at most p; None: `why` has the reason."""
    why: str = ""


def samples_needed(probability: float) -> int:
    """Return the least number of samples for a bound at this probability."""
    return max(MIN_SAMPLES, math.ceil(1.0 / (probability * math.exp(FURTHEST))))


def tail_bound(values: np.ndarray, probability: float, *, unit: float | None = None) -> Bound:
    """Return the value that the next one exceeds with a probability of at most `probability`.

    Args:
        values: f64 [n], independent and of one kind, none negative.
        probability: p.
        unit: distance between two neighbouring values of a count; None for other numbers.
    """
    n = len(values)
    if n < samples_needed(probability):
        return Bound(None, f"{n} samples, {samples_needed(probability)} needed")
    if not np.isfinite(values).all():
        return Bound(None, "not finite")
    ordered = np.sort(values.astype(np.float64))[::-1]
    m = max(_LEAST_EXCESSES, math.ceil(_EXCESS_SHARE * n))
    if unit is None:
        return _continuous(ordered, m, probability)
    return _counts(np.ceil(ordered / unit).astype(np.int64), m, probability, unit)


def _continuous(ordered: np.ndarray, m: int, probability: float) -> Bound:
    positive = int((ordered > ordered[-1]).sum())
    m = min(m, positive, len(ordered) - 1)
    if m < _LEAST_EXCESSES // 2:
        return Bound(None, f"only {m} of {len(ordered)} differ from the least")
    excess = ordered[:m] - ordered[m]
    if not excess.any():
        return Bound(None, f"the {m + 1} largest of {len(ordered)} are all alike")
    spread = float(excess.std() / excess.mean())
    if spread > 1.0 + _SPREAD_SIGMAS / math.sqrt(m):
        return Bound(None, f"a heavier tail than exponential (spread {spread:.2f} of {m})")
    scale = float(excess.sum()) / _gamma_quantile(m, 1.0 - _CONFIDENCE)
    reach = _reach(m, len(ordered), probability)
    return Bound(max(float(ordered[0]), float(ordered[m]) + scale * reach))


def _counts(ordered: np.ndarray, m: int, probability: float, unit: float) -> Bound:
    """Return the bound by P(X >= u + j) <= q r**j, with the largest r that the excesses allow."""
    start = int(ordered[m - 1])
    excess = ordered[ordered >= start] - start
    m = len(excess)
    mean = float(excess.mean())
    widest = math.sqrt(mean * (mean + 1.0))  # of a geometric distribution
    if mean and float(excess.std()) > widest * (1.0 + _SPREAD_SIGMAS / math.sqrt(m)) + 1.0:
        return Bound(None, f"a heavier tail than geometric (spread {excess.std() / widest:.2f})")
    ratio = _geometric_ratio(int(excess.sum()), m)
    steps = math.ceil(_reach(m, len(ordered), probability) / -math.log(ratio))
    return Bound(unit * max(int(ordered[0]), start - 1 + steps))


def _reach(m: int, n: int, probability: float) -> float:
    """Return ln(q / p): the distance of the bound from u, in scales."""
    return max(0.0, math.log((m + 2.0 * math.sqrt(m)) / (n * probability)))


def _gamma_quantile(shape: int, share: float) -> float:
    """Return x with P(Gamma(shape, 1) <= x) = share."""

    def at_most(x: float) -> float:
        logs = [i * math.log(x) - x - math.lgamma(i + 1) for i in range(shape)]
        return 1.0 - math.fsum(map(math.exp, logs))

    return root(lambda x: at_most(x) - share, 1e-9, float(shape), halvings=_HALVINGS)


def _geometric_ratio(total: int, count: int) -> float:
    """Return the largest r for which `count` geometric excesses sum to at most `total` in 5 %."""

    def at_most(ratio: float) -> float:
        logs = [
            math.lgamma(count + s)
            - math.lgamma(count)
            - math.lgamma(s + 1)
            + s * math.log(ratio)
            + count * math.log1p(-ratio)
            for s in range(total + 1)
        ]
        return math.fsum(map(math.exp, logs))

    share = 1.0 - _CONFIDENCE
    return root(lambda r: share - at_most(r), 1e-12, 1.0 - 1e-12, halvings=_HALVINGS)
