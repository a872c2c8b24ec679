"""Re-grading: the learner's rewards are the validator's, and a false claim costs the submission."""

from __future__ import annotations

from verify.checks.base import Subject, at_most, no_faults
from verify.formats.verdict import CheckResult
from verify.thresholds import REWARD_TOLERANCE


class RewardCheck:
    """max(|T - T'|, |P - P'|) between claimed and re-graded task reward and length penalty."""

    name = "reward"

    def run(self, subject: Subject) -> list[CheckResult]:
        results = []
        for row, graded in zip(subject.rollouts, subject.grades, strict=True):
            if graded is None:  # the grader's fault, not the worker's
                results.append(no_faults(self.name, []))
                continue
            task = abs(row.task_reward - graded.task_reward)
            length = abs(row.length_penalty - graded.length_penalty)
            results.append(
                at_most(self.name, max(task, length), REWARD_TOLERANCE, "claimed against re-graded")
            )
        return results
