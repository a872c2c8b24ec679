"""Checks against the prefill: claimed log-probs, the seeded choice of tokens, TOPLOC proofs.

Each check gives a result for each recomputed rollout (`Subject.prefilled`), in order.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np

from verify.checks.base import Subject, at_most, few_exceptions
from verify.formats.submission import Rollout
from verify.formats.verdict import CheckResult
from verify.recompute import Recomputed
from verify.thresholds import MODULUS_SLACK, NULL_BITS, RICH_BITS, TERMS_SLACK, Limits
from verify.toploc.codec import MalformedProof
from verify.toploc.statistics import RADII, ChunkStatistics, NullTest, null_test


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


def several_versions(row: Rollout) -> CheckResult:
    """Return the result of a rollout that several versions sampled, which no prefill reproduces.

    The value is the number of versions. The result passes, because only trusted pools have such
    rollouts.
    """
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
        else nearest_to_failing(judge_proofs(found.proof, subject.limits))
        for _, found in subject.prefilled
    ]


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
