"""Re-grading: the learner's rewards are the validator's, and a false claim costs the submission."""

from __future__ import annotations

import numpy as np

from verify.checks.base import Subject, at_most, no_faults
from verify.formats.verdict import CheckResult
from verify.thresholds import REWARD_TOLERANCE


class RewardCheck:
    """max(|T - T'|, |P - P'|) between claimed and re-graded task reward and length penalty.

    Where a grade is not repeatable (a slower machine may run out of time on the same program), T
    is not compared, and P only where the two agree on T, for some forms of P depend on it. The
    rewards that train are the re-graded ones either way.
    """

    name = "reward"

    def run(self, subject: Subject) -> list[CheckResult]:
        results = []
        for row, graded in zip(subject.rollouts, subject.grades, strict=True):
            if graded is None:  # the grader's fault, not the worker's
                results.append(no_faults(self.name, []))
                continue
            task = _distance(row.task_reward, graded.task_reward)
            length = _distance(row.length_penalty, graded.length_penalty)
            if not graded.repeatable and task > REWARD_TOLERANCE:
                results.append(
                    CheckResult(self.name, True, 0.0, REWARD_TOLERANCE, "not repeatable")
                )
                continue
            results.append(
                at_most(self.name, max(task, length), REWARD_TOLERANCE, "claimed against re-graded")
            )
        return results


def _distance(claimed: float, graded: float) -> float:
    """Claims are written in float32; large ones would be off by that alone."""
    return abs(claimed - float(np.float32(graded)))
