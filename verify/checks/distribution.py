"""Checks of unseeded pools: whether the policy's distributions gave the tokens and the ends.

A product of likelihood ratios is a martingale. Let o_t be drawn from p_t, and let q_t be any other
distribution that depends only on the past. Then E[ prod_t q_t(o_t) / p_t(o_t) ] = 1. By Markov's
inequality the product reaches 1 / alpha with a probability of at most alpha, whatever the tails
are. The same holds for a mean of such products. The alternatives q_t resemble attacks:

    temperature T / a   q = p^a / sum_v p_v^a                            a in POWERS
    both                q = half of the largest a, half of the smallest: more spread than p
    cut at c            q = (1 - W) p + W p [p >= c max p] / sum of that   c in HEADS; 1 is greedy

The sampler's p differs by rounding. E[q / p] then exceeds 1 by a term of second order in the
distance of the log-probs (the first order cancels), as the mean gap of seeded sampling does. So
`gap_mean` nats a token are subtracted. A token at the edge of top-k or top-p that some samplers cut
is no evidence.

`ends` checks where rollouts end, by the same products for the end token alone. With h_t its
probability at position t and a_t that of another policy, a position adds log a_t / h_t where the
rollout ends and log (1 - a_t) / (1 - h_t) where it goes on. The a_t are:

    odds times c     c above 1: ends come too early; below 1: too late; near 0: padding
    r besides        a = h + (1 - h) r: an end anywhere, however improbable, at a rate of r a token

Honest sampling sometimes ends at h = 0.1, and that counts with its chance. An output that is cut at
the largest length counts for the positions at which it went on.

Rounding may move the log-odds of the end token by tau. Alternatives with earlier ends are compared
with h at odds larger by a factor of exp(tau), those with later ends with h at smaller odds. Since
a_t lies beyond these odds, the mean of each ratio is at most 1 for every h between.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from runspec.core.errors import UserError
from verify.checks.base import Subject, at_most, few_exceptions
from verify.formats.verdict import CheckResult
from verify.recompute import Recomputed
from verify.thresholds import Limits
from verify.truncation import HEADS, POWERS, Choices

ALPHA = 1e-6
"""Largest share of honest submissions that a kind of evidence rejects: half by rows, half as a
whole."""
_WEIGHT = 0.9
"""W. It is below 1, so that one token below the cut does not refute an alternative for good."""
NAMES = (
    *(f"temperature / {a:g}" for a in POWERS),
    f"temperatures / {POWERS[0]:g} and {POWERS[-1]:g}",
    *(f"nothing below {c:g} of the largest probability" for c in HEADS),
)
"""Names of the alternatives of tokens, in order."""
_MORE, _FEWER, _RATES = (2.0, 5.0, 20.0), (0.5, 0.2, 0.02), (1e-2, 1e-3, 1e-4)
END_NAMES = (
    *(f"odds of the end token times {c:g}" for c in (*_MORE, *_FEWER)),
    *(f"ends anywhere, {r:g} a token" for r in _RATES),
)
"""Names of the alternatives of ends, in order."""
_CERTAIN, _IMPOSSIBLE = -1e-6, -80.0
"""Log-probs of the end token are clipped to these, nats."""


def choices_of(recomputed: Recomputed) -> Choices:
    """Return the distributions of a rollout that was not seeded.

    Raises:
        UserError: the prefill engine does not compute them.
    """
    if recomputed.choices is None:
        raise UserError(
            "the prefill engine does not compute the distributions of unseeded tokens",
            place="verify.engine",
            remedy="name an engine that does (jax), or let the pool sample seeded",
        )
    return recomputed.choices


def log_ratios(choices: Choices) -> np.ndarray:
    """Return f64 [n, len(NAMES)]: log q_t(o_t) / p_t(o_t) of each alternative."""
    logprobs = choices.logprobs.astype(np.float64)[:, None]
    tempered = (np.array(POWERS) - 1.0) * logprobs - choices.log_powers
    both = np.logaddexp(tempered[:, :1], tempered[:, -1:]) - math.log(2.0)
    within = choices.below_top[:, None] <= -np.log(HEADS)
    heads = 1.0 - _WEIGHT + _WEIGHT * within * np.exp(-choices.log_heads.astype(np.float64))
    ratios = np.concatenate([tempered, both, np.log(heads)], axis=1)
    return np.where(choices.sure[:, None] > 0.0, ratios, np.minimum(ratios, 0.0))


def evidence(sums: np.ndarray, names: Sequence[str] = NAMES) -> tuple[float, str]:
    """Return the log of the mean of the alternatives' products, and a text with the best one.

    Args:
        sums: f64 [len(names)], the log of each product.
        names: names of the alternatives.
    """
    best = int(np.argmax(sums))
    mean = float(np.logaddexp.reduce(sums)) - math.log(len(sums))
    return mean, f"nats for {names[best]} against the policy's own"


def sums(choices: Choices, slack: float) -> np.ndarray:
    """Return f64 [len(NAMES)]: the sum of `log_ratios` over a rollout, minus `slack` a token."""
    return (log_ratios(choices) - slack).sum(axis=0)


def each_evidence(name: str, names: Sequence[str], sums: Sequence[np.ndarray]) -> list[CheckResult]:
    """Judge the evidence of each of R rollouts; the limit is log(2 R / alpha).

    Args:
        name: name of the check.
        names: names of the alternatives.
        sums: f64 [len(names)] of each rollout, the log of each product of ratios.
    """
    limit, found = math.log(2.0 * len(sums) / ALPHA), [evidence(each, names) for each in sums]
    return [at_most(name, value, limit, words) for value, words in found]


def all_evidence(name: str, names: Sequence[str], sums: Sequence[np.ndarray]) -> list[CheckResult]:
    """Judge the evidence of all rollouts together; the limit is log(2 / alpha)."""
    value, words = evidence(np.sum(sums, axis=0), names)
    return [at_most(name, value, math.log(2.0 / ALPHA), words)] * len(sums)


def chosen_tokens(subject: Subject) -> list[CheckResult]:
    return each_evidence("chosen_tokens", NAMES, _token_sums(subject))


def chosen_tokens_submission(subject: Subject) -> list[CheckResult]:
    return all_evidence("chosen_tokens_submission", NAMES, _token_sums(subject))


def ends(subject: Subject) -> list[CheckResult]:
    return each_evidence("ends", END_NAMES, _end_sums(subject))


def ends_submission(subject: Subject) -> list[CheckResult]:
    return all_evidence("ends_submission", END_NAMES, _end_sums(subject))


def _token_sums(subject: Subject) -> list[np.ndarray]:
    return [sums(choices_of(c), subject.limits.gap_mean) for _, c in subject.prefilled]


def _end_sums(subject: Subject) -> list[np.ndarray]:
    tau = subject.limits.gap
    return [
        end_sums(choices_of(c), ended=row.finish_reason == "stop", tau=tau)
        for row, c in subject.prefilled
    ]


def kept_tokens(subject: Subject) -> list[CheckResult]:
    """Check that tokens are among those that a sampler with top-k or top-p may keep.

    `verify.truncation` defines these tokens, and how far a token may lie below. The share of
    exceptions is that of seeded choices (`few_exceptions`).
    """
    return [
        judge_outside(choices_of(found).outside, subject.limits) for _, found in subject.prefilled
    ]


def judge_outside(outside: np.ndarray, limits: Limits) -> CheckResult:
    """Judge `Choices.outside` of one rollout."""
    return few_exceptions(
        "kept_tokens",
        outside,
        limits,
        largest="token {token} lies below those that top-k and top-p keep",
        over="tokens below those that are kept, by more than",
    )


def end_sums(choices: Choices, *, ended: bool, tau: float) -> np.ndarray:
    """Return the log of each alternative's product of ratios over a rollout, f64 [len(END_NAMES)].

    Args:
        choices: numbers of its output tokens.
        ended: whether it ended by the end token, and not at the largest length.
        tau: largest change of log-odds by rounding.
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
    """Return log-odds, f64 [n], from log-probs of the end token."""
    log_end = np.clip(log_end.astype(np.float64), _IMPOSSIBLE, _CERTAIN)
    return log_end - np.log(-np.expm1(log_end))
