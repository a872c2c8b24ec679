"""Measures recomputed submissions: the numbers that have limits, and what limits reject."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from verify.checks.prefill import (
    judge_all_gaps,
    judge_gaps,
    judge_proofs,
    logprob_diff,
    logprob_limit,
)
from verify.formats.submission import Rollout
from verify.recompute import Recomputed
from verify.thresholds import Limits
from verify.toploc.selection import TOP_K
from verify.toploc.statistics import RADII, ChunkStatistics

SHORT_BELOW = (128, 256, 1024)
"""Chunks with fewer activations than these have limits of their own, because all, most or many of
their activations are among the k largest."""
CHECKS = ("log-probs", "seeded choice", "TOPLOC")
PAIR = tuple[Rollout, Recomputed]


def key_of(name: str, below: int | None) -> str:
    """Return the name of a number of a class of chunks in a profile."""
    return name if below is None else f"{name} < {below}"


@dataclass
class Measurements:
    """Values of each number, one for each rollout or submission that has it."""

    values: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    gaps: list[np.ndarray] = field(default_factory=list)
    """f32 [n] of each group of each submission, where the pool samples seeded."""
    submissions: int = 0
    rollouts: int = 0
    tokens: int = 0
    chunks: int = 0
    fewest_judged: int = TOP_K
    """k of the smallest chunk."""

    def take(self, pairs: Sequence[PAIR], limits: Limits) -> None:
        """Add a submission.

        Args:
            pairs: its rollouts, each with what was recomputed and well-formed proofs.
            limits: the published limits; their `gap_share` decides which gap tau must cover.
        """
        tokens = sum(len(row.output_tokens) for row, _ in pairs)
        self.submissions += 1
        self.rollouts += len(pairs)
        self.tokens += tokens
        distance = sum(logprob_diff(*pair) * len(pair[0].output_tokens) for pair in pairs)
        self.values["logprob_submission"].append(distance / tokens)
        groups: dict[int, list[np.ndarray]] = defaultdict(list)
        for row, found in pairs:
            self.values["logprob_rollout"].append(logprob_diff(row, found))
            self._take_proof(found.proof)
            if found.seeded_gap is not None:
                groups[row.group].append(found.seeded_gap)
                ordered = np.sort(found.seeded_gap)[::-1]
                self.values["gap"].append(float(ordered[int(limits.gap_share * len(ordered))]))
                self.values["gap_max"].append(float(ordered[0]))
        self.gaps += [np.concatenate(each) for each in groups.values()]

    def unit(self, name: str, below: int | None) -> float | None:
        """Return the distance between two neighbouring values of a count; None for other numbers.

        Shares of chunks with fewer than 128 activations have longer steps. The smallest chunk's
        steps are the longest; with shorter steps the tail would fall off too fast.
        """
        if "_share" in name:
            return 1.0 / (self.fewest_judged if below == TOP_K else TOP_K)
        return 1.0 if name == "mantissa_median" else None

    def _take_proof(self, proof: object) -> None:
        """Add the worst chunk of a rollout in each class, by each number."""
        assert isinstance(proof, list), "malformed proofs were refused before"
        classes: dict[int | None, list[ChunkStatistics]] = defaultdict(list)
        for chunk in proof:
            below = next((each for each in SHORT_BELOW if chunk.elements < each), None)
            classes[below].append(chunk)
            self.fewest_judged = min(self.fewest_judged, chunk.k)
        self.chunks += len(proof)
        for below, chunks in classes.items():
            worst: dict[str, float] = defaultdict(float)
            for chunk in chunks:
                for name, value in _of_chunk(chunk):
                    worst[name] = max(worst[name], value)
            for name, value in worst.items():
                self.values[key_of(name, below)].append(value)


def _of_chunk(chunk: ChunkStatistics) -> Iterator[tuple[str, float]]:
    """Yield the numbers of a chunk; shares are those of k."""
    yield "mismatch_share", (chunk.exponent_mismatches + chunk.sign_mismatches) / chunk.k
    for radius, misses in zip(RADII, chunk.misses, strict=True):
        yield f"miss_share {radius}", misses / chunk.k
    yield "mantissa_mean", chunk.mantissa_error_mean
    yield "mantissa_median", chunk.mantissa_error_median


@dataclass
class Rejections:
    """Counts of the rollouts and submissions that some limits reject."""

    limits: Limits
    rollouts: int = 0
    submissions: int = 0
    rejected_rollouts: int = 0
    """Rollouts that one of their own numbers rejects."""
    rejected_submissions: int = 0
    """Submissions that any number rejects."""
    by: tuple[int, ...] = (0, 0, 0)
    """Submissions that each of `CHECKS` rejects by itself."""

    def named(self) -> dict[str, int]:
        """Return `by`, with the names of the checks."""
        return dict(zip(CHECKS, self.by, strict=True))

    def take(self, pairs: Sequence[PAIR]) -> None:
        """Judge a submission and count what is rejected."""
        each = [_failed(pair, self.limits) for pair in pairs]
        together = _failed_together(pairs, self.limits)
        failed = np.logical_or.reduce([*each, together])
        self.rollouts += len(pairs)
        self.submissions += 1
        self.rejected_rollouts += sum(map(any, each))
        self.rejected_submissions += bool(failed.any())
        self.by = tuple(int(n) for n in np.add(self.by, failed))


def _failed(pair: PAIR, limits: Limits) -> list[bool]:
    """Return which of `CHECKS` reject one rollout."""
    row, found = pair
    logprobs = logprob_diff(*pair) <= logprob_limit(limits.logprob_rollout, [row])
    gaps = found.seeded_gap is None or judge_gaps(found.seeded_gap, limits).passed
    assert isinstance(found.proof, list), "malformed proofs were refused before"
    proofs = all(result.passed for result in judge_proofs(found.proof, limits))
    return [not logprobs, not gaps, not proofs]


def _failed_together(pairs: Sequence[PAIR], limits: Limits) -> list[bool]:
    """Return which of `CHECKS` reject the submission as a whole."""
    lengths = [len(row.output_tokens) for row, _ in pairs]
    mean = float(np.average([logprob_diff(*pair) for pair in pairs], weights=lengths))
    logprobs = mean <= logprob_limit(limits.logprob_submission, [row for row, _ in pairs])
    gaps = [found.seeded_gap for _, found in pairs if found.seeded_gap is not None]
    choices = not gaps or judge_all_gaps(np.concatenate(gaps), limits).passed
    return [not logprobs, not choices, False]
