"""Computes grades of groups and statistics of a batch, and rejects duplicates, from verdicts.

Only the coordinator sees the verdicts of all validators, so it compares submissions with each
other. Verdicts have hashes of runs of tokens that no two honest rollouts share
(`verify.checks.rows` has the bound). The coordinator remembers the hashes of accepted
rollouts that may still train. It rejects a submission that shares a run with one of them, even if
the verdict accepts it.

The submission that is judged first stays. Only the coordinator and the validators see outputs, so
a worker that has another worker's output received it from that worker. A guess cannot make an
honest worker a duplicate: it would have to contain 48 nats of what that worker samples later.
"""

from __future__ import annotations

import logging
import math
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

from runspec.core.run_files import submission_files
from verify.coordinator.machine.events import GroupGrade
from verify.coordinator.machine.gap_history import is_fault
from verify.coordinator.machine.state import State, Tally
from verify.formats.lease import Lease
from verify.formats.tables import MalformedTable
from verify.formats.verdict import RolloutVerdict, read_fingerprints

_log = logging.getLogger(__name__)
_REASON = re.compile(
    r"duplicates: row \d+: \d+ runs of tokens of submission (?P<submission>[0-9a-f]{64}), "
    r"which was judged before"
)


class VerdictMismatch(ValueError):
    """Raised for a verdict file whose rows are not exactly the rollouts of its submission."""


def grade_groups(
    rows: Sequence[RolloutVerdict],
    *,
    submission: str,
    lease: Lease,
    group_size: int,
    dropped: Collection[int],
    zero_variance_filter: bool,
) -> tuple[GroupGrade, ...]:
    """Return the grade of each group of an accepted submission, in order.

    Args:
        rows: rows of the verdict file.
        submission: digest that every row must name.
        lease: gives the number of groups.
        group_size: rollouts a group.
        dropped: groups lost to a fault of the grader.
        zero_variance_filter: whether groups with all task rewards equal are filtered.

    Raises:
        VerdictMismatch: rows are missing, doubled, or belong to another submission.
    """
    if any(row.submission != submission for row in rows):
        raise VerdictMismatch("a row names another submission")
    if [row.row for row in rows] != list(range(len(rows))):
        raise VerdictMismatch("rows must be numbered 0, 1, 2, ... in order")
    # Their sum too, because the ledger's JSON has no infinity.
    if not math.isfinite(sum(abs(n) for row in rows for n in _numbers(row))):
        raise VerdictMismatch("rewards, log-prob differences and gaps must be finite")
    by_group: dict[int, list[RolloutVerdict]] = defaultdict(list)
    for row in rows:
        by_group[row.group].append(row)
    sizes = {group: len(members) for group, members in by_group.items()}
    # Compare the number first: in a ledger that an audit reads, a lease may claim any number.
    if len(sizes) != lease.groups or sizes != dict.fromkeys(range(lease.groups), group_size):
        raise VerdictMismatch(f"{lease.groups} groups of {group_size} rows are needed")
    if not set(dropped) <= set(by_group):
        raise VerdictMismatch("dropped_groups names a group that does not exist")
    return tuple(
        _grade(group, by_group[group], group in dropped, zero_variance_filter)
        for group in range(lease.groups)
    )


def _numbers(row: RolloutVerdict) -> tuple[float, ...]:
    differences = (row.logprob_diff or 0.0, row.gap_excess or 0.0)
    return (row.task_reward, row.length_penalty, row.reward, *differences)


def _grade(
    group: int, rows: list[RolloutVerdict], dropped: bool, zero_variance_filter: bool
) -> GroupGrade:
    equal = len({row.task_reward for row in rows}) == 1
    filtered = zero_variance_filter and equal
    return GroupGrade(
        group=group,
        outcome="dropped" if dropped else "filtered" if filtered else "usable",
        rollouts=len(rows),
        tokens=sum(row.length for row in rows),
        target=rows[0].target,
        task_reward=_mean([row.task_reward for row in rows]) or 0.0,
        reward=_mean([row.reward for row in rows]) or 0.0,
        length_error=_mean([abs(r.target - r.length) for r in rows if r.target is not None]),
        logprob_diff=_mean([r.logprob_diff for r in rows if r.logprob_diff is not None]),
        answered=sum(row.answered for row in rows),
    )


def batch_stats(
    tally: Tally,
    *,
    opened: float,
    closed: float,
    busy_fraction: float | None,
) -> dict[str, Any]:
    """Return `stats` of a batch manifest; means are over the rollouts of all graded groups.

    A mean of nothing (no group was graded, none had a target) is None. So is the busy fraction if
    no worker has reported it yet.
    """
    graded = [g for g in tally.grades if g.outcome != "dropped"]
    by_target: dict[int, list[GroupGrade]] = defaultdict(list)
    for grade in graded:
        if grade.target is not None:
            by_target[grade.target].append(grade)
    return {
        "opened": opened,
        "closed": closed,
        "leased_groups": tally.leased_groups,
        "graded_groups": len(graded),
        "filtered_groups": sum(g.outcome == "filtered" for g in graded),
        "dropped_groups": len(tally.grades) - len(graded) + tally.set_aside_groups,
        "expired_groups": tally.expired_groups,
        "accepted_rollouts": sum(g.rollouts for g in graded),
        "rejected_rollouts": tally.rejected_rollouts,
        "rejected_submissions": tally.rejected_submissions,
        "task_reward_mean": _weighted(graded, [g.task_reward for g in graded]),
        "reward_mean": _weighted(graded, [g.reward for g in graded]),
        "length_mean": _length(graded),
        "length_error_mean": _weighted(graded, [g.length_error for g in graded]),
        "logprob_diff_mean": _weighted(graded, [g.logprob_diff for g in graded]),
        "by_target": {
            str(target): {
                "rollouts": sum(g.rollouts for g in grades),
                "task_reward_mean": _weighted(grades, [g.task_reward for g in grades]),
                "length_mean": _length(grades),
            }
            for target, grades in sorted(by_target.items())
        },
        "sampler_busy_fraction": busy_fraction,
    }


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _weighted(grades: Sequence[GroupGrade], means: Iterable[float | None]) -> float | None:
    """Return the mean over rollouts from means of groups; groups without one are left out."""
    pairs = [(g.rollouts, m) for g, m in zip(grades, means, strict=True) if m is not None]
    rollouts = sum(n for n, _ in pairs)
    return sum(n * m for n, m in pairs) / rollouts if rollouts else None


def _length(grades: Sequence[GroupGrade]) -> float | None:
    rollouts = sum(g.rollouts for g in grades)
    return sum(g.tokens for g in grades) / rollouts if rollouts else None


def repeated_submission(reason: str) -> str | None:
    """Return the submission that `Seen.fault` named; None for a rejection of another kind."""
    found = _REASON.fullmatch(reason)
    return found["submission"] if found else None


def by_coordinator(reason: str) -> bool:
    """Whether only the coordinator, and no validator, rejects for this reason."""
    return repeated_submission(reason) is not None or is_fault(reason)


class Seen:
    """Fingerprints of accepted rollouts, at most `MAX_FINGERPRINTS` of each."""

    def __init__(self) -> None:
        self._steps: dict[int, dict[int, str]] = {}
        """For each step and fingerprint, the submission that contained it first."""

    @classmethod
    def of(cls, run_dir: Path, state: State) -> Seen:
        """Read the fingerprints of accepted submissions from the verdict files, after a restart."""
        seen = cls()
        for record in state.leases.values():
            if record.status != "accepted" or record.submission is None:
                continue
            step = record.lease.step
            path = submission_files(run_dir, step, record.submission).verdict
            try:
                seen.add(step, record.submission, read_fingerprints(path))
            except (OSError, MalformedTable) as error:
                _log.warning("new rollouts are not compared with those of %s: %s", path, error)
        return seen

    def add(self, step: int, submission: str, prints: Sequence[Sequence[int]]) -> None:
        """Remember the rows of an accepted submission."""
        known = self._steps.setdefault(step, {})
        for row in prints:
            for fingerprint in row:
                known.setdefault(fingerprint, submission)

    def fault(self, rows: Sequence[RolloutVerdict]) -> str:
        """Describe the first row that shares a run of tokens with an accepted one, or return ''."""
        for number, row in enumerate(rows):
            for known in self._steps.values():
                shared = [known[f] for f in row.fingerprints if f in known]
                if shared:
                    return (
                        f"duplicates: row {number}: {len(shared)} runs of tokens of submission "
                        f"{shared[0]}, which was judged before"
                    )
        return ""

    def forget(self, oldest: int) -> None:
        """Forget steps below `oldest`, which can train no more."""
        for step in [step for step in self._steps if step < oldest]:
            del self._steps[step]
