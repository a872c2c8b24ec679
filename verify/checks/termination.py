"""Checks of where unseeded rollouts end: neither too early nor too late for the policy.

Products of likelihood ratios again, as in `verify.checks.distribution`, of which only the end token
matters: with h_t its probability at position t and a_t that of another policy, a position adds
log a_t / h_t where the rollout ends and log (1 - a_t) / (1 - h_t) where it goes on. The a_t are:

    odds times c     for c above 1 ends come too early, below 1 too late, c near 0 is padding
    r besides        a = h + (1 - h) r: an end anywhere, however improbable, at a rate of r a token

Honest sampling ends at h = 0.1 at times, and that counts as the chance that it is. Outputs that are
cut at the longest count for the positions at which they went on.

Rounding may move the log-odds of the end token by tau. Alternatives with earlier ends are compared
with h at odds larger by a factor of exp(tau), those with later ones at smaller odds; a_t lies
beyond, so that the mean of each ratio is at most 1 for every h between.
"""

from __future__ import annotations

import math

import numpy as np

from verify.checks.distribution import EvidenceCheck, SubmissionEvidenceCheck
from verify.choices import Choices
from verify.formats.submission import Rollout
from verify.thresholds import Limits

_MORE, _FEWER, _RATES = (2.0, 5.0, 20.0), (0.5, 0.2, 0.02), (1e-2, 1e-3, 1e-4)
NAMES = (
    *(f"odds of the end token times {c:g}" for c in (*_MORE, *_FEWER)),
    *(f"ends anywhere, {r:g} a token" for r in _RATES),
)
"""Of the alternatives, in order."""
_CERTAIN, _IMPOSSIBLE = -1e-6, -80.0
"""Log-probs of the end token beyond these are not told apart, nats."""


def end_sums(choices: Choices, *, ended: bool, tau: float) -> np.ndarray:
    """f64 [len(NAMES)]: log of each alternative's product of ratios over a rollout.

    Args:
        choices: of its output tokens.
        ended: by the end token, and not at the longest output.
        tau: what rounding may do to log-odds.
    """
    most, least = _log_odds(choices.end_most) + tau, _log_odds(choices.end_least) - tau
    odds = [(most, math.log(c)) for c in _MORE] + [(least, math.log(c)) for c in _FEWER]
    went_on = len(most) - ended
    found = [
        float((np.logaddexp(0.0, x) - np.logaddexp(0.0, x + log_c)).sum()) + ended * log_c
        for x, log_c in odds
    ]
    for rate in _RATES:
        end = float(np.logaddexp(0.0, math.log(rate) - most[-1])) if ended else 0.0
        found.append(end + went_on * math.log1p(-rate))
    return np.array(found)


def _log_odds(log_end: np.ndarray) -> np.ndarray:
    """f64 [n], of log-probs of the end token."""
    log_end = np.clip(log_end.astype(np.float64), _IMPOSSIBLE, _CERTAIN)
    return log_end - np.log(-np.expm1(log_end))


def _sums(row: Rollout, choices: Choices, limits: Limits) -> np.ndarray:
    return end_sums(choices, ended=row.finish_reason == "stop", tau=limits.gap)


ENDS = EvidenceCheck("ends", NAMES, _sums)
ENDS_SUBMISSION = SubmissionEvidenceCheck("ends_submission", NAMES, _sums)
