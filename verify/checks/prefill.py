"""Checks against the prefill: log-probs, the seeded choice of tokens, TOPLOC proofs, distributions.

Each check gives a result for each recomputed rollout (`Subject.prefilled`), in order.

The checks of unseeded pools ask whether the policy's distributions gave the tokens and the ends.
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
from collections import Counter
from collections.abc import Sequence

import numpy as np

from runspec.core.errors import UserError
from runspec.core.schema.samplers import SamplerPool
from verify.checks import Check, Subject, at_most, few_exceptions
from verify.formats.submission import Rollout
from verify.formats.verdict import CheckResult
from verify.recompute import Recomputed
from verify.thresholds import MODULUS_SLACK, NULL_BITS, RICH_BITS, TERMS_SLACK, Limits
from verify.toploc import MalformedProof
from verify.toploc.statistics import RADII, ChunkStatistics, NullTest, null_test
from verify.truncation import HEADS, POWERS, Choices


def logprob_diff(row: Rollout, recomputed: Recomputed) -> float:
    """Return the mean |claimed - recomputed| log-prob over the output tokens."""
    return float(_distances(row, recomputed).mean())


def logprob_limit(limit: float, rows: Sequence[Rollout]) -> float:
    """Return the largest mean |claimed - recomputed| log-prob over some rollouts of a submission.

    If rounding moves the edge of top-p, sampler and validator keep different sets. Each set has at
    least top_p of the probability, so log-probs differ by at most -log top_p beside rounding. Of
    two tokens at the edge of top-k either may be the k-th. A validator then counts its own token
    and the sampled one, so log-probs differ by at most log(1 + 1 / k). One edge is allowed for each
    row of a group, because their first tokens all follow the same prompt.

    Args:
        limit: `Limits.logprob_submission` or `logprob_rollout`.
        rows: rollouts of one pool.
    """
    alike = max(Counter(row.group for row in rows).values())
    tokens = sum(len(row.output_tokens) for row in rows)
    top_p, top_k = rows[0].top_p, rows[0].top_k
    edge = (math.log1p(1.0 / top_k) if top_k > 0 else 0.0) - math.log(top_p)
    return limit + alike * edge / tokens


def not_recomputed(row: Rollout) -> CheckResult:
    """Return the result of a rollout that no prefill reproduces: several versions sampled it, or
    its environment did not start.

    The value is the number of versions. The result passes, because only trusted pools have the
    former, and the latter is never trained.
    """
    if row.is_of_its_version:
        return CheckResult("prefill", True, 1.0, 1.0, "not recomputed: no environment started")
    versions = np.unique(row.versions) if row.versions is not None else np.array([row.version])
    return CheckResult(
        "prefill",
        True,
        float(len(versions)),
        float(len(versions)),
        f"not recomputed: sampled under versions {versions[0]} to {versions[-1]}, in flight",
    )


def logprobs(subject: Subject) -> list[CheckResult]:
    """Check (1/n) sum_t |log mu_claimed(o_t) - log pi_v(o_t)| of a rollout (`logprob_limit`)."""
    limit, words = subject.limits.logprob_rollout, "claimed against recomputed log-probs"
    return [
        at_most("logprobs", logprob_diff(row, found), logprob_limit(limit, [row]), words)
        for row, found in subject.prefilled
    ]


def logprobs_submission(subject: Subject) -> list[CheckResult]:
    """Check the same mean over all tokens of the submission, with a tighter limit."""
    mean = float(np.concatenate([_distances(*pair) for pair in subject.prefilled]).mean())
    rows = [row for row, _ in subject.prefilled]
    limit = logprob_limit(subject.limits.logprob_submission, rows)
    return [at_most("logprobs_submission", mean, limit, "mean over the submission")] * len(rows)


def seeded_sampling(subject: Subject) -> list[CheckResult]:
    """Check that each token is the argmax of logits / T + noise, or lies close below it.

    The gap g_t is the recomputed maximum minus the chosen token's value. `few_exceptions` defines
    how many gaps may exceed tau, and by how much.
    """
    return [judge_gaps(_gaps(found), subject.limits) for _, found in subject.prefilled]


def judge_gaps(gaps: np.ndarray, limits: Limits) -> CheckResult:
    """Judge the gaps of one rollout, f32 [n]: the largest, or how many exceed tau."""
    return few_exceptions(
        "seeded_sampling",
        gaps,
        limits,
        largest="gap of token {token}, below the sampled one",
        over="tokens with a gap above",
    )


def seeded_sampling_submission(subject: Subject) -> list[CheckResult]:
    """Check (1/N) sum_t g_t <= gap_mean + gap / N over the N tokens of a submission.

    Slightly different weights move few tokens, each by a little. The mean gap grows with the square
    of the distance in log-probs, so it tells them from rounding even if no single token does. In a
    calibrated pool the gaps must also keep the budget of its rounding (`verify.thresholds`).
    """
    gaps = np.concatenate([_gaps(found) for _, found in subject.prefilled])
    return [judge_all_gaps(gaps, subject.limits)] * len(subject.prefilled)


def judge_all_gaps(gaps: np.ndarray, limits: Limits) -> CheckResult:
    """Judge the gaps of all tokens of a submission, f32 [N], by the number nearest to failing."""
    name, tokens, noise = "seeded_sampling_submission", len(gaps), limits.gap_noise
    mean, most = float(gaps.mean(dtype=np.float64)), limits.gap_mean + limits.gap / tokens
    results = [at_most(name, mean, most, "mean gap over the submission")]
    if noise is not None:
        counted, most = noise.counted(gaps) / tokens, noise.largest_mean(tokens)
        words = f"mean gap over the submission, each counted up to {noise.cap:g}"
        results.append(at_most(name, counted, most, words))
    return nearest_to_failing(results)


def toploc(subject: Subject) -> list[CheckResult]:
    """Check TOPLOC proofs against the recomputed activations.

    The reported value and limit are those of `judge_proofs` that come nearest to failing.
    """
    return [
        CheckResult("toploc", False, 1.0, 0.0, str(found.proof))
        if isinstance(found.proof, MalformedProof)
        else nearest_to_failing(judge_proofs(found.proof, subject.limits) or [_NO_PROOF])
        for _, found in subject.prefilled
    ]


_NO_PROOF = CheckResult("toploc", True, 0.0, 0.0, "turns before the environment failed")


def judge_proofs(chunks: Sequence[ChunkStatistics], limits: Limits) -> list[CheckResult]:
    """Judge the proofs of one rollout: return each number with its limit.

    The numbers of each chunk are:
    - the modulus and the degree, which only an honest interpolation has;
    - the positions that differ in exponent or sign, with a limit that scales with k;
    - the mean and median mantissa error where exponents agree;
    - the median error, compared with the median error that a constant proof could reach, if it is
      more than rounding explains (a constant itself lacks terms);
    - if a guess would be detected (`NULL_BITS`), the positions that are off by more than the null
      test's radius.
    Chunks that are too short or predictable for the last are counted; their count never fails.
    """
    results, weak = [], []
    for number, chunk in enumerate(chunks):
        measures = _measures(chunk, limits.for_chunk(chunk.elements))
        test = null_test_of(chunk, limits)
        if test.bits >= NULL_BITS:
            what = f"positions off by more than {RADII[test.radius]} units in the last place"
            measures.append((what, chunk.misses[test.radius], test.allowed))
        else:
            weak.append(test.bits)
        results += [
            at_most("toploc", value, limit, f"{what} of chunk {number}")
            for what, value, limit in measures
        ]
    if weak:
        words = f"chunks too short or too predictable to tell from a guess, {min(weak):.0f} bits"
        results.append(at_most("toploc", len(weak), len(chunks), words))
    return results


def null_test_of(chunk: ChunkStatistics, limits: Limits) -> NullTest:
    """Return the test of a chunk against guessing under these limits."""
    here = limits.for_chunk(chunk.elements)
    return null_test(
        chunk,
        shares=(here.miss_share, here.mismatch_share),
        noise=here.mantissa_median,
        enough_bits=RICH_BITS,
    )


def nearest_to_failing(results: Sequence[CheckResult]) -> CheckResult:
    """Return the result that failed by most or, if none failed, came nearest to its limit."""
    return max(results, key=lambda r: (not r.passed, r.value / r.limit if r.limit else 0.0))


def _measures(chunk: ChunkStatistics, limits: Limits) -> list[tuple[str, float, float]]:
    mismatches = chunk.exponent_mismatches + chunk.sign_mismatches
    mean = ("mean mantissa error", chunk.mantissa_error_mean, limits.mantissa_mean)
    return [
        ("exponent or sign mismatches", mismatches, limits.mismatch_share * chunk.k),
        *([mean] if math.isfinite(limits.mantissa_mean) else []),
        ("median mantissa error", chunk.mantissa_error_median, limits.mantissa_median),
        (
            "median error against a constant's",
            chunk.error_median,
            max(limits.constant_ratio * chunk.constant_error, limits.mantissa_median),
        ),
        ("distance below the honest modulus", chunk.modulus_gap, MODULUS_SLACK),
        ("missing leading terms", chunk.missing_terms, TERMS_SLACK),
    ]


def _distances(row: Rollout, recomputed: Recomputed) -> np.ndarray:
    return np.abs(row.logprobs.astype(np.float64) - recomputed.logprobs)


def _gaps(recomputed: Recomputed) -> np.ndarray:
    if recomputed.seeded_gap is None:
        raise RuntimeError("the prefill engine gave no gaps for a seeded pool")
    return recomputed.seeded_gap


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
    end, tau = subject.task_set.eos_token_id, subject.limits.gap
    return [
        end_sums(choices_of(c), ended=row.output_tokens == end, tau=tau)
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


def end_sums(choices: Choices, *, ended: np.ndarray, tau: float) -> np.ndarray:
    """Return the log of each alternative's product of ratios over a rollout, f64 [len(END_NAMES)].

    Args:
        choices: numbers of its output tokens.
        ended: bool [n], where it, or a turn of it, ended by the end token.
        tau: largest change of log-odds by rounding.
    """
    most, least = _log_odds(choices.end_most) + tau, _log_odds(choices.end_least) - tau
    odds = [(most, math.log(c)) for c in _MORE] + [(least, math.log(c)) for c in _FEWER]
    times = int(ended.sum())
    found = [
        float((np.logaddexp(0.0, x) - np.logaddexp(0.0, x + log_c)).sum()) + times * log_c
        for x, log_c in odds
    ]
    for rate in _RATES:
        end = float(np.logaddexp(0.0, math.log(rate) - most[ended]).sum())
        found.append(end + (len(most) - times) * math.log1p(-rate))
    return np.array(found)


def _log_odds(log_end: np.ndarray) -> np.ndarray:
    """Return log-odds, f64 [n], from log-probs of the end token."""
    log_end = np.clip(log_end.astype(np.float64), _IMPOSSIBLE, _CERTAIN)
    return log_end - np.log(-np.expm1(log_end))


def prefill_checks(pool: SamplerPool) -> list[Check]:
    """Return the checks that need the prefill, cheap ones first."""
    seeded = [seeded_sampling, seeded_sampling_submission]
    unseeded = [kept_tokens, ends_submission, ends, chosen_tokens_submission, chosen_tokens]
    tokens = seeded if pool.sampling.seeded else unseeded
    return [logprobs_submission, logprobs, *tokens, toploc]
