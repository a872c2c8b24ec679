"""What every check is: a look at a submission that gives each row a number and a limit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from runspec.spec.schema import SamplerPool
from verify.formats.lease import Assignment, Lease
from verify.formats.submission import Rollout
from verify.formats.verdict import CheckResult
from verify.plugins import Graded, TaskSet
from verify.recompute import Recomputed
from verify.thresholds import Limits


@dataclass(frozen=True)
class Subject:
    """A submission under examination, with what is known of it so far."""

    submission: str
    """Digest of its Parquet bytes."""
    rollouts: list[Rollout]
    lease: Lease
    lease_digest: str
    pool: SamplerPool
    group_size: int
    vocab_size: int
    task_set: TaskSet
    assignments: list[Assignment]
    """Of the lease's groups, in order."""
    limits: Limits
    grades: list[Graded | None] = field(default_factory=list)
    """Of each row, once graded; None in dropped groups."""
    recomputed: list[Recomputed] = field(default_factory=list)
    """Of each row, once prefilled."""

    def max_output(self, rollout: Rollout) -> int:
        """Output tokens after which sampling had to stop."""
        room = self.pool.max_model_len - len(rollout.prompt_tokens)
        return min(self.pool.max_new_tokens, room)


class Check(Protocol):
    """A check; it fails the submission when it fails any row."""

    name: str

    def run(self, subject: Subject) -> list[CheckResult]:
        """A result for each row, in order."""


@dataclass(frozen=True)
class Examination:
    """What a sequence of checks found."""

    results: list[list[CheckResult]]
    """Of each row."""
    reason: str
    """The first failure: check, row, number, limit; empty when all passed."""


def examine(
    checks: Sequence[Check], subject: Subject, before: Examination | None = None
) -> Examination:
    """Runs checks in order, up to the first that fails a row.

    Args:
        checks: what to run.
        subject: the submission.
        before: what earlier checks found; where one failed already, nothing is run.
    """
    if before is None:
        before = Examination([[] for _ in subject.rollouts], "")
    results, reason = [list(row) for row in before.results], before.reason
    for check in checks:
        if reason:
            break
        found = check.run(subject)
        for row, result in zip(results, found, strict=True):
            row.append(result)
        reason = next((failure(r, row) for row, r in enumerate(found) if not r.passed), "")
    return Examination(results, reason)


def failure(result: CheckResult, row: int) -> str:
    """One line that says what failed, where, and by how much."""
    return (
        f"{result.name}: row {row}: {result.reason} "
        f"(measured {result.value:.6g}, limit {result.limit:.6g})"
    )


def at_most(name: str, value: float, limit: float, reason: str) -> CheckResult:
    """Passes when value <= limit; NaN does not."""
    return CheckResult(name, bool(value <= limit), float(value), float(limit), reason)


def no_faults(name: str, faults: Sequence[str]) -> CheckResult:
    """Passes without faults; else the value is their number and the reason the first."""
    return CheckResult(name, not faults, float(len(faults)), 0.0, faults[0] if faults else "")
