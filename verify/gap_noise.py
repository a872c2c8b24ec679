"""How far rounding alone may take the seeded choice: a budget of gaps that falls with the tokens.

The gap g_t of a token (`SeededSamplingCheck`) is 0 but where rounding turned the choice. It counts
up to a cap, x_t = min(g_t, cap). What is assumed: given prompt and tokens before, honest x_t have
means that are mu at most on average over the tokens of a submission. exp is convex, so for
theta > 0, whatever the distribution is,

    E exp(theta x_t) <= 1 + mu_t (exp(theta cap) - 1) / cap <= exp(mu_t (exp(theta cap) - 1) / cap)

No variance, no tail and no independence is. Of N tokens, with the best theta (Chernoff),

    P( (1/N) sum_t x_t >= r mu ) <= p      where   r log r - r + 1 = log(1 / p) cap / (mu N)

Of all that a worker hands in: exp(theta sum_t (x_t - `drift` mu)), drift = (exp(u) - 1) / u and
theta = u / cap, is a supermartingale that starts at 1, so by Ville's inequality the sum exceeds
log(1 / p) / theta at any time with a chance of p. A worker that was honest once must not live on
it: the sum starts anew whenever it falls below 0 (Page's CUSUM). An alarm then is one of a sum that
started at one of its submissions: `SUBMISSIONS` of them raise a false one with a chance of p.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # commands that judge nothing read limits too, and start in 0.2 s
    import numpy as np

SUBMISSIONS = 10_000
"""Of one worker, among which a false alarm has the chance p."""
_U = 0.4314
DRIFT = math.expm1(_U) / _U
"""1.25: what a worker's mean may come to for ever, in honest means."""


@dataclass(frozen=True)
class GapNoise:
    """What a calibration says of the gaps of an honest pool (`verify.calibration.derive`)."""

    cap: float
    """What of one token's gap counts, nats; above 0."""
    mean: float
    """mu: of honest gaps so counted, nats a token; above 0."""
    probability: float
    """p, in (0, 1)."""

    def counted(self, gaps: np.ndarray) -> float:
        """sum_t min(g_t, cap) of f32 [n] gaps, nats."""
        return float(gaps.clip(max=self.cap).sum(dtype="float64"))

    def largest_mean(self, tokens: int) -> float:
        """What the mean of so many counted gaps may come to, nats."""
        spread = -math.log(self.probability) * self.cap / (self.mean * tokens)
        return min(self.cap, self.mean * _ratio(spread))

    def excess(self, gaps: np.ndarray) -> float:
        """By how much f32 [n] gaps exceed what a worker's may come to for ever, nats."""
        return self.counted(gaps) - DRIFT * self.mean * len(gaps)

    @property
    def largest_excess(self) -> float:
        """What the excesses of a worker's submissions may add up to, nats."""
        return math.log(SUBMISSIONS / self.probability) * self.cap / _U


def _ratio(spread: float) -> float:
    """r >= 1 with r log r - r + 1 = spread, by bisection."""
    low, high = 1.0, math.e**2 + spread
    for _ in range(80):
        middle = (low + high) / 2.0
        if middle * math.log(middle) - middle + 1.0 < spread:
            low = middle
        else:
            high = middle
    return high
