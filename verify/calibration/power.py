"""What limits are worth: the share of rollouts and submissions that they reject."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from verify.calibration.measure import PAIR
from verify.checks.base import at_most
from verify.checks.prefill import (
    judge_all_gaps,
    judge_gaps,
    judge_proofs,
    logprob_diff,
    logprob_limit,
)
from verify.thresholds import Limits

CHECKS = ("log-probs", "seeded choice", "TOPLOC")


@dataclass
class Rejections:
    """Counts of what some limits reject."""

    limits: Limits
    rollouts: int = 0
    submissions: int = 0
    rejected_rollouts: int = 0
    """By a number of their own."""
    rejected_submissions: int = 0
    """By any number."""
    by: tuple[int, ...] = (0, 0, 0)
    """Submissions that each of `CHECKS` rejects by itself."""

    def named(self) -> dict[str, int]:
        """`by`, with the names of the checks."""
        return dict(zip(CHECKS, self.by, strict=True))

    def take(self, pairs: Sequence[PAIR]) -> None:
        """Judges a submission."""
        each = [_failed(pair, self.limits) for pair in pairs]
        together = _failed_together(pairs, self.limits)
        failed = np.logical_or.reduce([*each, together])
        self.rollouts += len(pairs)
        self.submissions += 1
        self.rejected_rollouts += sum(map(any, each))
        self.rejected_submissions += bool(failed.any())
        self.by = tuple(int(n) for n in np.add(self.by, failed))


def _failed(pair: PAIR, limits: Limits) -> list[bool]:
    """Of one rollout, by check."""
    row, found = pair
    most = logprob_limit(limits.logprob_rollout, [row])
    logprobs = at_most("", logprob_diff(*pair), most, "").passed
    gaps = found.seeded_gap is None or judge_gaps(found.seeded_gap, limits).passed
    assert isinstance(found.proof, list), "malformed proofs were refused before"
    proofs = all(result.passed for result in judge_proofs(found.proof, limits))
    return [not logprobs, not gaps, not proofs]


def _failed_together(pairs: Sequence[PAIR], limits: Limits) -> list[bool]:
    """Of the submission as a whole, by check."""
    lengths = [len(row.output_tokens) for row, _ in pairs]
    mean = float(np.average([logprob_diff(*pair) for pair in pairs], weights=lengths))
    most = logprob_limit(limits.logprob_submission, [row for row, _ in pairs])
    logprobs = at_most("", mean, most, "").passed
    gaps = [found.seeded_gap for _, found in pairs if found.seeded_gap is not None]
    choices = not gaps or judge_all_gaps(np.concatenate(gaps), limits).passed
    return [not logprobs, not choices, False]
