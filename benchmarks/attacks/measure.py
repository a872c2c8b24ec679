"""Detection of submissions of any size, from what the checks say of single rollouts.

A submission is rejected when a row of it is, or when a mean over its tokens exceeds its limit. So
rows are judged once, by the checks themselves, and submissions are drawn from them. That this comes
to what the examiner decides is compared on whole submissions (`decided`). A worker is found out
when the coordinator adds up what its submissions exceed the noise of its pool by (`found_out`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.stats import beta

from verify.checks import Subject
from verify.checks.prefill import logprobs, seeded_sampling, toploc
from verify.checks.rows import termination
from verify.thresholds import DRIFT, GapNoise, Limits

ROW_CHECKS = {
    "termination": termination,
    "logprobs": logprobs,
    "seeded_sampling": seeded_sampling,
    "toploc": toploc,
}
SUBMISSION_CHECKS = ("logprobs_submission", "seeded_sampling_submission")
CHECKS = (*ROW_CHECKS, *SUBMISSION_CHECKS)
CONFIDENCE = 0.95
_AT_ONCE = 500
_OF_A_WORKER = 32
"""Rollouts of each of its submissions."""
_ENOUGH = 0.999


@dataclass(frozen=True)
class Rows:
    """What the checks need of each rollout of a class."""

    tokens: np.ndarray
    """i64 [M]."""
    distance: np.ndarray
    """f64 [M]: sum of |claimed - recomputed| log-prob, nats."""
    gaps: np.ndarray
    """f64 [M]: sum of gaps, nats."""
    counted: np.ndarray
    """f64 [M]: the same, each gap up to the cap of the limits; 0 where they have none."""
    gap_max: np.ndarray
    """f64 [M]."""
    above: np.ndarray
    """i64 [M]: tokens with a gap above tau."""
    failed: np.ndarray
    """bool [M, 4]: by each of `ROW_CHECKS`."""

    def only(self, kept: np.ndarray) -> Rows:
        """Those where bool [M] is true."""
        return Rows(*(array[kept] for array in vars(self).values()))


def rows_of(subject: Subject) -> Rows:
    """Of a submission that holds all rollouts of a class."""
    pairs = subject.prefilled
    failed = [[not result.passed for result in check(subject)] for check in ROW_CHECKS.values()]
    gaps = [np.asarray(found.seeded_gap, np.float64) for _, found in pairs]
    noise = subject.limits.gap_noise
    return Rows(
        tokens=np.array([len(row.output_tokens) for row, _ in pairs]),
        distance=np.array(
            [np.abs(row.logprobs.astype(np.float64) - f.logprobs).sum() for row, f in pairs]
        ),
        gaps=np.array([each.sum() for each in gaps]),
        counted=np.array([noise.counted(each) if noise else 0.0 for each in gaps]),
        gap_max=np.array([each.max() for each in gaps]),
        above=np.array([(each > subject.limits.gap).sum() for each in gaps]),
        failed=np.array(failed).T,
    )


def decided(rows: Rows, chosen: np.ndarray, limits: Limits) -> np.ndarray:
    """bool [S, 6]: which of `CHECKS` reject the submissions that i64 [S, R] rows make."""
    tokens = rows.tokens[chosen].sum(1)
    distance = rows.distance[chosen].sum(1) / tokens
    gap = rows.gaps[chosen].sum(1) / tokens
    choices = ~(gap <= limits.gap_mean + limits.gap / tokens)
    if limits.gap_noise is not None:
        largest = np.array([limits.gap_noise.largest_mean(int(n)) for n in tokens])
        choices |= ~(rows.counted[chosen].sum(1) / tokens <= largest)
    by_rows = rows.failed[chosen].any(1)
    means = [~(distance <= limits.logprob_submission), choices]
    return np.concatenate([by_rows, np.stack(means, 1)], 1)


def found_out(rows: Rows, noise: GapNoise, *, submissions: int, workers: int) -> dict[str, float]:
    """How many tokens workers get by with whose submissions are all accepted by themselves.

    Args:
        rows: of a class; submissions of 32 are drawn from them with replacement.
        noise: of the pool.
        submissions: after which no more are looked at.
        workers: how many are tried.

    Returns:
        `share` of the workers found out, and the `tokens` by which 99.9 % of them were; without
        where they were not.
    """
    rng, tokens = np.random.default_rng(0), np.zeros(workers)
    total, needed = np.zeros(workers), np.full(workers, np.inf)
    for _ in range(submissions):
        chosen = rng.integers(0, len(rows.tokens), (workers, _OF_A_WORKER))
        lengths = rows.tokens[chosen].sum(1)
        tokens += lengths
        excess = rows.counted[chosen].sum(1) - DRIFT * noise.mean * lengths
        total = np.maximum(0.0, total + excess)
        alarmed = (total > noise.largest_excess) & np.isinf(needed)
        needed[alarmed] = tokens[alarmed]
    found = {"share": float(np.isfinite(needed).mean())}
    most = float(np.sort(needed)[math.ceil(_ENOUGH * workers) - 1])
    return found | ({"tokens": most} if math.isfinite(most) else {})


def detection(
    rows: Rows, limits: Limits, sizes: Sequence[int], trials: int
) -> list[dict[str, object]]:
    """Rejected submissions by their rollouts: `trials` of each size, drawn with replacement."""
    rng, table = np.random.default_rng(0), []
    for size in sizes:
        rejected, tokens = np.zeros(len(CHECKS) + 1, np.int64), 0
        for start in range(0, trials, _AT_ONCE):
            count = min(_AT_ONCE, trials - start)
            chosen = rng.integers(0, len(rows.tokens), (count, size))
            found = decided(rows, chosen, limits)
            rejected[:-1] += found.sum(0)
            rejected[-1] += found.any(1).sum()
            tokens += int(rows.tokens[chosen].sum())
        table.append(
            {
                "rollouts": size,
                "tokens": round(tokens / trials),
                "detected": rejected[-1] / trials,
                "at_least": round(interval(int(rejected[-1]), trials)[0], 5),
                "by": {
                    name: round(count / trials, 4)
                    for name, count in zip(CHECKS, rejected[:-1].tolist(), strict=True)
                    if count
                },
            }
        )
    return table


def largest_mean_gaps(rows: Rows, sizes: Sequence[int], trials: int) -> dict[str, float]:
    """By tokens, the largest mean gap of so many submissions drawn from honest rollouts, nats."""
    rng, found = np.random.default_rng(0), {}
    for size in sizes:
        chosen = rng.integers(0, len(rows.tokens), (trials, size))
        tokens = rows.tokens[chosen].sum(1)
        found[str(round(tokens.mean()))] = float((rows.gaps[chosen].sum(1) / tokens).max())
    return found


def interval(hits: int, trials: int) -> tuple[float, float]:
    """Clopper and Pearson's two-sided interval of a rate, at 95 %."""
    tail = (1 - CONFIDENCE) / 2
    low = beta.ppf(tail, hits, trials - hits + 1) if hits else 0.0
    high = beta.ppf(1 - tail, hits + 1, trials - hits) if hits < trials else 1.0
    return float(low), float(high)
