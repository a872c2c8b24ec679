"""Numbers of a rollout's tokens that rounding keeps near 0, but for few."""

from __future__ import annotations

import numpy as np

from verify.checks.base import at_most
from verify.formats.verdict import CheckResult
from verify.thresholds import SHORT_TAUS, Limits


def few_exceptions(
    check: str, values: np.ndarray, limits: Limits, *, largest: str, over: str
) -> CheckResult:
    """At most floor(gap_share n) of n values above tau, and none above `gap_max`.

    A rollout too short for one exception may have one all the same, up to `SHORT_TAUS` tau:
    rounding has tails, which short rollouts meet as often a token as long ones. Where `gap_share`
    is 0 there is none.

    Args:
        check: its name.
        values: f32 [n], one a token.
        limits: `gap` is tau.
        largest: names the largest value, with {token} for its index.
        over: names the number of exceptions.
    """
    allowed, worst = int(limits.gap_share * len(values)), int(np.argmax(values))
    most = limits.gap_max
    if not allowed:
        taus = SHORT_TAUS if limits.gap_share else 1.0
        most = min(taus * limits.gap, limits.gap_max)
    found = at_most(check, float(values[worst]), most, largest.format(token=worst))
    if not found.passed or not limits.gap_share:
        return found
    count = int((~(values <= limits.gap)).sum())
    return at_most(check, count, max(1, allowed), f"{over} {limits.gap}")
