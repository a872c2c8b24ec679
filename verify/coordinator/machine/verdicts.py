"""What follows from verdicts: grades, statistics and latencies of a batch, and rejections.

Only the coordinator sees the verdicts of all validators, so it compares submissions with each
other. Verdicts have hashes of runs of tokens that no two honest rollouts share
(`verify.checks.rows` has the bound). The coordinator remembers the hashes of accepted
rollouts that may still train. It rejects a submission that shares a run with one of them, even if
the verdict accepts it.

The submission that is judged first stays. Only the coordinator and the validators see outputs, so
a worker that has another worker's output received it from that worker. A guess cannot make an
honest worker a duplicate: it would have to contain 48 nats of what that worker samples later.

One submission may be too small to show slightly different weights or another temperature; a hundred
submissions show them. So the coordinator sums by how much the gaps of a worker's submissions exceed
their long-run budget in a calibrated pool (`verify.thresholds`). A submission that takes the sum
above its limit is rejected. The sum then stays at the limit, so that a later submission that lowers
it is accepted.

Latencies and rates are folded from the ledger's events like the state, so they survive a restart.
"""

from __future__ import annotations

import math
import re
from array import array
from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import numpy as np

from verify.coordinator.machine import events
from verify.coordinator.machine.events import GroupGrade
from verify.coordinator.machine.state import FilterBy, Tally, Worker
from verify.coordinator.machine.trust import WORKERS_GAPS
from verify.formats.lease import Lease
from verify.formats.verdict import RolloutVerdict
from verify.thresholds import GapNoise

_REASON = re.compile(
    r"duplicates: row \d+: \d+ runs of tokens of submission (?P<submission>[0-9a-f]{64}), "
    r"which was judged before"
)


RECENT = 1000
"""Submissions in the `recent` percentiles."""
BUCKETS_S = (1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0, 7200.0)
"""Upper ends of the Prometheus buckets, in seconds."""
_RATE_OVER = 64
"""Number of verdicts over which the rate is measured."""
_LEAST_SPAN_S = 1.0
"""Least number of seconds over which a rate is measured."""


class VerdictMismatch(ValueError):
    """Raised for a verdict file whose rows are not exactly the rollouts of its submission, or lack
    what the coordinator's spec asks for."""


def grade_groups(
    rows: Sequence[RolloutVerdict],
    *,
    submission: str,
    lease: Lease,
    group_size: int,
    dropped: Collection[int],
    filter_by: FilterBy,
) -> tuple[GroupGrade, ...]:
    """Return the grade of each group of an accepted submission, in order.

    Args:
        rows: rows of the verdict file.
        submission: digest that every row must name.
        lease: gives the number of groups.
        group_size: rollouts a group.
        dropped: groups lost to a fault of the grader.
        filter_by: the rewards that are compared; None filters nothing.

    Raises:
        VerdictMismatch: rows are missing, doubled, or belong to another submission.
    """
    if any(row.submission != submission for row in rows):
        raise VerdictMismatch("a row names another submission")
    if [row.row for row in rows] != list(range(len(rows))):
        raise VerdictMismatch("rows must be numbered 0, 1, 2, ... in order")
    # Their sum too, because the ledger's JSON has no infinity.
    numbers = (
        (r.task_reward, r.length_penalty, r.reward, r.logprob_diff or 0.0, r.gap_excess or 0.0)
        for r in rows
    )
    if not math.isfinite(sum(abs(n) for of_row in numbers for n in of_row)):
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
        _grade(group, by_group[group], group in dropped, filter_by) for group in range(lease.groups)
    )


def _grade(
    group: int, rows: list[RolloutVerdict], dropped: bool, filter_by: FilterBy
) -> GroupGrade:
    compared = {row.task_reward if filter_by == "task" else row.reward for row in rows}
    filtered = filter_by is not None and len(compared) == 1
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


# -- Gaps of all submissions of a worker together --------------------------------------------------


def excess_of(rows: Sequence[RolloutVerdict], noise: GapNoise | None) -> float | None:
    """Return the excess of a submission, nats; None if not calibrated or not recomputed.

    Raises:
        VerdictMismatch: a recomputed row has no gaps: the validator has another spec.
    """
    if noise is None:
        return None
    recomputed = [row.gap_excess for row in rows if row.logprob_diff is not None]
    found = [excess for excess in recomputed if excess is not None]
    if len(found) < len(recomputed):
        raise VerdictMismatch("no gaps for a calibrated pool: the validator has another spec")
    return sum(found) if found else None


def gap_fault(worker: Worker, excess: float | None, noise: GapNoise | None) -> str:
    """Return why a submission is rejected by the gaps of its worker; empty if it is not."""
    if excess is None or noise is None:
        return ""
    total, limit = worker.excess_with(excess, noise), noise.largest_excess
    if total <= limit:
        return ""
    return (
        f"{WORKERS_GAPS}: the gaps of its submissions together are more than rounding explains "
        f"(excess {total:.4g} nats, limit {limit:.4g})"
    )


def is_gap_fault(reason: str) -> bool:
    """Whether a rejection is for `gap_fault`."""
    return reason.startswith(f"{WORKERS_GAPS}: ")


# -- Rollouts that another submission had before ---------------------------------------------------


def repeated_submission(reason: str) -> str | None:
    """Return the submission that `Seen.fault` named; None for a rejection of another kind."""
    found = _REASON.fullmatch(reason)
    return found["submission"] if found else None


def by_coordinator(reason: str) -> bool:
    """Whether only the coordinator, and no validator, rejects for this reason."""
    return repeated_submission(reason) is not None or is_gap_fault(reason)


class Seen:
    """Fingerprints of accepted rollouts, at most `MAX_FINGERPRINTS` of each."""

    def __init__(self) -> None:
        self._steps: dict[int, dict[int, str]] = {}
        """For each step and fingerprint, the submission that contained it first."""

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


# -- Latencies -------------------------------------------------------------------------------------


class Durations:
    """All measured durations in seconds, eight bytes each, so that percentiles are exact."""

    def __init__(self) -> None:
        self._all = array("d")

    def add(self, seconds: float) -> None:
        self._all.append(max(0.0, seconds))  # a clock may be set back

    def report(self) -> dict[str, Any]:
        """Return percentiles of the last `RECENT` durations and of the whole run."""
        return {"recent": percentiles(self._all[-RECENT:]), "run": percentiles(self._all)}

    def histogram(self) -> tuple[list[tuple[str, float]], float]:
        """Return cumulative counts by bucket, in Prometheus' form, and the sum of all durations."""
        values = np.sort(np.asarray(self._all))
        counts = np.searchsorted(values, BUCKETS_S, side="right")
        buckets = [(str(end), float(n)) for end, n in zip(BUCKETS_S, counts, strict=True)]
        return [*buckets, ("+Inf", float(len(values)))], float(values.sum())


class History:
    """Latencies and rates of submissions; `take` receives every event of the ledger, in order."""

    def __init__(self) -> None:
        self.to_verdict, self.to_manifest = Durations(), Durations()
        self._bytes: dict[str, int] = {}
        """Sizes of the submissions without a verdict, by lease."""
        self._untrained: dict[str, float] = {}
        """Arrival of each submission, by lease, until a manifest names it."""
        self._since_batch: list[float] = []
        self._verdicts: deque[float] = deque(maxlen=_RATE_OVER)
        self._opened: dict[int, float] = {}
        """Opening times of the open steps."""
        self._accepted: deque[tuple[float, int]] = deque()
        """Time and accepted output tokens of each verdict since the oldest open step opened."""

    def take(self, event: events.Event, remembered: Iterable[str]) -> None:
        """Record an event.

        Args:
            event: the newest event.
            remembered: leases that the state after it still has.
        """
        match event:
            case events.NonceDrawn():
                self._opened.setdefault(event.step, event.at)
            case events.SubmissionReceived():
                self._bytes[event.lease] = event.bytes
                self._untrained[event.lease] = event.at
            case events.SubmissionJudged():
                self._bytes.pop(event.lease, None)
                self._verdicts.append(event.at)
                took = event.at - self._untrained[event.lease]
                self._since_batch.append(took)
                self.to_verdict.add(took)
                tokens = sum(g.tokens for g in event.groups if g.outcome != "dropped")
                self._accepted.append((event.at, tokens))
                if not event.accepted:
                    del self._untrained[event.lease]
            case events.SubmissionSetAside():
                self._bytes.pop(event.lease, None)
                del self._untrained[event.lease]
            case events.StepClosed():
                for took in self._trained(event.at, event.trained):
                    self.to_manifest.add(took)
                kept = set(remembered) - {group.lease for group in event.trained}
                self._untrained = {le: at for le, at in self._untrained.items() if le in kept}
                self._since_batch = []
                self._opened.pop(event.step, None)
                oldest = min(self._opened.values(), default=event.at)
                while self._accepted and self._accepted[0][0] < oldest:
                    self._accepted.popleft()
            case events.RolledBack():
                self._bytes, self._untrained, self._since_batch = {}, {}, []
                self._opened, self._accepted = {}, deque()

    def bytes_of(self, lease: str) -> int:
        """Return the bytes of a submission that waits for its verdict."""
        return self._bytes.get(lease, 0)

    def verdicts_per_s(self, now: float) -> float:
        """Return the rate of the last verdicts; it falls while none arrives. 0 before the first."""
        if not self._verdicts:
            return 0.0
        return len(self._verdicts) / max(now - self._verdicts[0], _LEAST_SPAN_S)

    def batch_stats(
        self, now: float, step: int, trained: Iterable[events.TrainedGroup]
    ) -> dict[str, Any]:
        """Return the part of a batch manifest's `stats` that the history gives.

        Args:
            now: seconds since the epoch, when the step closes.
            step: number of the step.
            trained: groups of the batch.

        Returns:
            Latencies in seconds, None without submissions; accepted output tokens a second while
            the step was open, None if it was open for no time.
        """
        opened, per_s = self._opened.get(step), None
        if opened is not None and now > opened:
            per_s = sum(tokens for at, tokens in self._accepted if at > opened) / (now - opened)
        verdict = percentiles(self._since_batch)
        manifest = percentiles(self._trained(now, trained))
        return {
            "verdict_latency_p50": verdict["p50"],
            "verdict_latency_p99": verdict["p99"],
            "manifest_latency_p50": manifest["p50"],
            "manifest_latency_p99": manifest["p99"],
            "accepted_tokens_per_s": per_s,
        }

    def _trained(self, now: float, trained: Iterable[events.TrainedGroup]) -> list[float]:
        """Return how long each submission waited for the first manifest that names it, seconds."""
        leases = dict.fromkeys(group.lease for group in trained)
        return [now - self._untrained[lease] for lease in leases if lease in self._untrained]


def percentiles(values: array[float] | list[float]) -> dict[str, Any]:
    """Return count, median and 99th percentile in seconds; None for the latter of no values."""
    if not len(values):
        return {"count": 0, "p50": None, "p99": None}
    p50, p99 = np.percentile(np.asarray(values), [50, 99])
    return {"count": len(values), "p50": round(float(p50), 3), "p99": round(float(p99), 3)}
