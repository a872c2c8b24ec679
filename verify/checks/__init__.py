"""The checks of a submission: each is a function that gives every row a number and a limit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from runspec.core.schema import SamplerPool
from verify.formats.lease import Assignment, Lease, episode_seed
from verify.formats.submission import Rollout
from verify.formats.verdict import CheckResult
from verify.plugins import Episode, Graded, TaskSet
from verify.recompute import Recomputed, Replayed
from verify.thresholds import SHORT_TAUS, Limits


@dataclass(frozen=True)
class Subject:
    """A submission under examination, with the results so far."""

    submission: str
    """Digest of its table."""
    rollouts: list[Rollout]
    lease: Lease
    lease_digest: str
    pool: SamplerPool
    group_size: int
    vocab_size: int
    task_set: TaskSet
    assignments: list[Assignment]
    """Assignments of the lease's groups, in order."""
    limits: Limits
    last_version: int
    """The newest version that the run will ever publish."""
    replays: Mapping[tuple[int, int], Replayed] = field(default_factory=dict)
    """Replays of the rows whose tasks have several turns, by group and sample, after the checks of
    their lengths."""
    grades: list[Graded | None] = field(default_factory=list)
    """Grade of each row, after grading; None in dropped groups."""
    recomputed: list[Recomputed | None] = field(default_factory=list)
    """Numbers of each row, after the prefill; None if no prefill can reproduce the row."""
    fingerprints: list[list[int]] = field(default_factory=list)
    """Hashes of each row, after all other checks have passed (`verify.checks.rows`)."""

    @property
    def prefilled(self) -> list[tuple[Rollout, Recomputed]]:
        """Rows that were recomputed, as far as they were replayed."""
        pairs = zip(self.rollouts, self.recomputed, strict=True)
        return [(self.part_of(rollout), found) for rollout, found in pairs if found is not None]

    @property
    def seeds(self) -> list[int]:
        """Seeds of the groups' episodes, in the order of the assignments."""
        return [episode_seed(self.lease, group) for group in range(len(self.assignments))]

    def replay_of(self, rollout: Rollout) -> Replayed | None:
        """Return the replay of a row; None if its task has one turn."""
        return self.replays.get((rollout.group, rollout.sample))

    def can_be_recomputed(self, rollout: Rollout) -> bool:
        """Return whether one version sampled a row, and its environment started."""
        replayed = self.replay_of(rollout)
        return rollout.is_of_its_version and (replayed is None or replayed.turns > 0)

    def part_of(self, rollout: Rollout) -> Rollout:
        """Return a row up to the turn after which its environment failed; else all of it."""
        replayed = self.replay_of(rollout)
        return rollout if replayed is None else replayed.part_of(rollout)

    def episode_of(self, rollout: Rollout) -> Episode | None:
        """Return a new episode of an assigned row's problem; None if it has one turn."""
        problem = self.assignments[rollout.group].problem
        return self.task_set.episode(problem, self.seeds[rollout.group])

    def max_output(self, rollout: Rollout) -> int:
        """Return the number of output tokens after which sampling had to stop."""
        room = self.pool.max_model_len - len(rollout.prompt_tokens)
        return min(self.pool.max_new_tokens, room)


Check = Callable[[Subject], list[CheckResult]]
"""Gives every row that it examines a result, in order; the submission fails when any row fails."""


def row_check(faults: Callable[[Rollout, Subject], Iterator[str]]) -> Check:
    """Return a check of each row by itself, named as the function that yields what is wrong.

    The value of a result counts the row's faults.
    """

    def check(subject: Subject) -> list[CheckResult]:
        return [no_faults(faults.__name__, list(faults(r, subject))) for r in subject.rollouts]

    return check


@dataclass(frozen=True)
class Examination:
    """Result of a sequence of checks."""

    results: list[list[CheckResult]]
    """Results of each row."""
    reason: str
    """The first failure: check, row, number, limit; empty when all passed."""


def examine(
    checks: Sequence[Check],
    subject: Subject,
    before: Examination | None = None,
    rows: Sequence[int] | None = None,
) -> Examination:
    """Run checks in order, up to the first that fails a row.

    Args:
        checks: checks to run.
        subject: the submission.
        before: result of earlier checks; if one has failed, nothing is run.
        rows: rows that these checks examine; None for all.
    """
    if before is None:
        before = Examination([[] for _ in subject.rollouts], "")
    results, reason = [list(row) for row in before.results], before.reason
    spoken_of = range(len(results)) if rows is None else rows
    for check in checks:
        if reason:
            break
        found = check(subject)
        for row, result in zip(spoken_of, found, strict=True):
            results[row].append(result)
            if not (reason or result.passed):
                reason = f"{result.name}: row {row}: {result.measured}"
    return Examination(results, reason)


def at_most(name: str, value: float, limit: float, reason: str) -> CheckResult:
    """Return a result that passes when value <= limit; NaN fails."""
    return CheckResult(name, bool(value <= limit), float(value), float(limit), reason)


def no_faults(name: str, faults: Sequence[str]) -> CheckResult:
    """Return a result that passes without faults; else its value is their number."""
    return CheckResult(name, not faults, float(len(faults)), 0.0, faults[0] if faults else "")


def few_exceptions(
    check: str, values: np.ndarray, limits: Limits, *, largest: str, over: str
) -> CheckResult:
    """Pass when at most floor(gap_share n) of n values exceed tau, and none exceeds `gap_max`.

    With rounding alone most values are near 0. A rollout that is too short for one exception may
    still have one, up to `SHORT_TAUS` tau, because a large rounding error is as frequent in short
    rollouts as in long ones. If `gap_share` is 0, no exception is allowed.

    Args:
        check: name of the check.
        values: f32 [n], one a token.
        limits: `gap` is tau.
        largest: text for the largest value, with {token} for its index.
        over: text for the number of exceptions.
    """
    allowed, worst = int(limits.gap_share * len(values)), int(np.argmax(values))
    most = limits.gap_max
    if not allowed:
        taus = SHORT_TAUS if limits.gap_share else 1.0
        most = min(taus * limits.gap, limits.gap_max)
    found = at_most(check, float(values[worst]), most, largest.format(token=worst))
    if not found.passed or not limits.gap_share:
        return found
    count = int((~(values <= limits.gap)).sum())
    return at_most(check, count, max(1, allowed), f"{over} {limits.gap}")
