"""Grades of groups from a verdict's rows, and statistics of a batch from grades."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from verify.coordinator.machine.events import GroupGrade
from verify.coordinator.machine.state import Tally
from verify.formats.lease import Lease
from verify.formats.verdict import RolloutVerdict


class VerdictMismatch(ValueError):
    """A verdict file whose rows are not exactly the rollouts of its submission."""


def grade_groups(
    rows: Sequence[RolloutVerdict],
    *,
    submission: str,
    lease: Lease,
    group_size: int,
    dropped: Collection[int],
    zero_variance_filter: bool,
) -> tuple[GroupGrade, ...]:
    """Grades of an accepted submission, a group each, in order.

    Args:
        rows: of the verdict file.
        submission: digest that every row must name.
        lease: says how many groups there must be.
        group_size: rollouts a group.
        dropped: groups lost to a fault of the grader.
        zero_variance_filter: whether groups with all task rewards equal are filtered.

    Raises:
        VerdictMismatch: rows are missing, doubled, or of something else.
    """
    if any(row.submission != submission for row in rows):
        raise VerdictMismatch("a row names another submission")
    if [row.row for row in rows] != list(range(len(rows))):
        raise VerdictMismatch("rows must be numbered 0, 1, 2, ... in order")
    # Sums of them too: the ledger's JSON has no infinity.
    if not math.isfinite(sum(abs(n) for row in rows for n in _numbers(row))):
        raise VerdictMismatch("rewards, log-prob differences and gaps must be finite")
    by_group: dict[int, list[RolloutVerdict]] = defaultdict(list)
    for row in rows:
        by_group[row.group].append(row)
    sizes = {group: len(members) for group, members in by_group.items()}
    # By number first: in the ledger that an audit reads, a lease may claim any.
    if len(sizes) != lease.groups or sizes != dict.fromkeys(range(lease.groups), group_size):
        raise VerdictMismatch(f"{lease.groups} groups of {group_size} rows are needed")
    if not set(dropped) <= set(by_group):
        raise VerdictMismatch("dropped_groups names a group that is not there")
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
    )


def batch_stats(
    tally: Tally,
    *,
    opened: float,
    closed: float,
    busy_fraction: float | None,
) -> dict[str, Any]:
    """`stats` of a batch manifest; means are over the rollouts of all graded groups.

    A mean of nothing (no group was graded, none had a target) is None, and so is a share of time
    that no worker has told of yet.
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
    """Mean over rollouts of what is a mean over each group's; groups without it are left out."""
    pairs = [(g.rollouts, m) for g, m in zip(grades, means, strict=True) if m is not None]
    rollouts = sum(n for n, _ in pairs)
    return sum(n * m for n, m in pairs) / rollouts if rollouts else None


def _length(grades: Sequence[GroupGrade]) -> float | None:
    rollouts = sum(g.rollouts for g in grades)
    return sum(g.tokens for g in grades) / rollouts if rollouts else None
