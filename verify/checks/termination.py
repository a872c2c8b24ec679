"""Checks of where unseeded rollouts end: neither too early nor too late for the policy.

With h_t the probability of the end token at position t and L_t = - sum_{s <= t} log(1 - h_s), a
rollout that ends at tau has exp(-L_tau) <= U <= exp(-L_{tau-1}) for a uniform U (the probability
integral transform of its length, whatever the other tokens). So

    early = 1 - exp(-L_tau)        late = exp(-L_{tau-1})

are p-values: either is at most u with a probability of at most u. An output cut at the longest has
early = 1, and L over all its positions for late. An honest rollout does end at h = 0.1 at times; a
submission whose ends all lie where nothing was at an end does not.

Over R rollouts, which are independent, sum_i -log p_i is at most a Gamma(R, 1) variable (Fisher),
and R times the least p_i is a p-value too (Bonferroni). Rounding may move the log-odds of the end
token by tau: `early` is computed of odds larger by a factor of exp(tau), `late` of smaller ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from verify.checks.base import Subject, at_most
from verify.checks.distribution import choices_of
from verify.choices import Choices
from verify.formats.verdict import CheckResult

ALPHA = 1e-6
"""Honest submissions rejected by where they end, at most; a quarter for each of early and late, by
single rollouts and over all."""
_CERTAIN = -1e-6
"""Log-probs of the end token above this are not told apart in float32, nats."""


def end_p_values(choices: Choices, *, ended: bool, tau: float) -> tuple[float, float]:
    """-log of the p-values `early` and `late` of a rollout, nats.

    Args:
        choices: of its output tokens.
        ended: by the end token, and not at the longest output.
        tau: what rounding may do to log-odds.
    """
    late = _hazards(choices.end_least, -tau)
    late_sum = float((late[:-1] if ended else late).sum())
    if not ended:
        return 0.0, late_sum
    early = -math.expm1(-float(_hazards(choices.end_most, tau).sum()))
    return -math.log(max(early, 1e-300)), late_sum


def _hazards(log_end: np.ndarray, shift: float) -> np.ndarray:
    """f64 [n]: -log(1 - h), of log-odds that are shifted."""
    sure = np.minimum(log_end.astype(np.float64), _CERTAIN)
    log_odds = sure - np.log(-np.expm1(sure))
    return np.logaddexp(0.0, log_odds + shift)


def fisher(nats: Sequence[float]) -> float:
    """-log P(Gamma(R, 1) >= sum of nats) of R independent p-values, in nats.

    The probability is exp(-x) sum_{k < R} x^k / k!.
    """
    total = float(sum(nats))
    if total <= 0.0:
        return 0.0
    terms = [k * math.log(total) - math.lgamma(k + 1) for k in range(len(nats))]
    return max(0.0, total - float(np.logaddexp.reduce(terms)))


class EndsCheck:
    """-log p of where each rollout ends; the limit is log(4 R / alpha) for R rollouts."""

    name = "ends"

    def run(self, subject: Subject) -> list[CheckResult]:
        return self.judged(_ends_of(subject))

    def judged(self, rows: Sequence[tuple[float, float]]) -> list[CheckResult]:
        """A result for each rollout's `end_p_values`."""
        limit = math.log(4.0 * len(rows) / ALPHA)
        return [
            at_most(self.name, max(row), limit, f"nats against so {_side(row)} an end")
            for row in rows
        ]


class SubmissionEndsCheck:
    """-log p of where the rollouts of the submission end together; the limit is log(4 / alpha)."""

    name = "ends_submission"

    def run(self, subject: Subject) -> list[CheckResult]:
        rows = _ends_of(subject)
        return [self.judged(rows)] * len(rows)

    def judged(self, rows: Sequence[tuple[float, float]]) -> CheckResult:
        """The result for the `end_p_values` of all rollouts."""
        both = fisher([early for early, _ in rows]), fisher([late for _, late in rows])
        words = f"nats against ends so {_side(both)} together"
        return at_most(self.name, max(both), math.log(4.0 / ALPHA), words)


def _side(early_and_late: tuple[float, float]) -> str:
    early, late = early_and_late
    return "early" if early >= late else "late"


def _ends_of(subject: Subject) -> list[tuple[float, float]]:
    return [
        end_p_values(choices_of(found), ended=row.finish_reason == "stop", tau=subject.limits.gap)
        for row, found in subject.prefilled
    ]
