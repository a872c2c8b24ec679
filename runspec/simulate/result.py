"""Result of a simulated run as plain data, and the record that counts its events."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from runspec.simulate import LEARNER, VALIDATORS, Coordinator, Interval
from runspec.simulate.workers import Worker
from verify.coordinator.machine import events
from verify.coordinator.machine.stalls import waited_for
from verify.coordinator.machine.state import State, Tally

_WAITED_FOR = {
    "learner": "the learner",
    "worker": "workers",
    "validators": "validators",
    "the": "the publisher",
}
"""Role that a run waits for, by the first word of `waited_for`, or `learner` at its end."""


@dataclass(frozen=True)
class StepResult:
    """One closed step. Times in seconds from the publication of version 0; the rest is groups."""

    number: int
    opened: float
    first_rollouts: float
    """Time at which its first submission was judged; that of its end if it closed without one."""
    closed: float
    trained_at: float | None
    """Time at which its training ended; None if the run ended before."""
    groups: int
    """Groups that it trains."""
    leased: int
    withheld: int
    """Groups withheld, late, or of banned workers."""
    rejected: int
    filtered: int
    lag: int
    """Largest lag of the rollouts that it trains on; 0 without any."""


@dataclass(frozen=True)
class GroupResult:
    """The outcome of one group of the population."""

    name: str
    strategy: str
    workers: int
    leases: int
    accepted: int
    """Accepted submissions."""
    rejected: int
    withheld: int
    """Leases without a submission."""
    sampled: int
    """Sampled rollouts; `trained` and `wasted` count rollouts too."""
    trained: int
    wasted: int
    """Rollouts neither trained nor filtered, and of no more use when the run ended."""
    idle: float | None
    """Share of its presence in which its engines were idle; None if no worker came."""


@dataclass(frozen=True)
class Sanction:
    """A quarantine or ban, or its end."""

    at: float
    worker: str
    what: str
    """`quarantined`, `banned` or `free`."""
    reason: str


@dataclass(frozen=True)
class Result:
    """A simulated run."""

    seed: int
    ended: str
    """`finished`, `stalled`, or `max_hours`: `budget.max_hours` or `run.LONGEST_H` has passed."""
    reason: str
    """Why the run stalled; else what the next step waits for."""
    remedy: str
    seconds: float
    steps: tuple[StepResult, ...]
    """Closed steps."""
    groups: tuple[GroupResult, ...]
    sanctions: tuple[Sanction, ...]
    idle_learner: float
    """Idle share of the learner, between the first and the last end of a training step."""
    idle_validators: float | None
    """Idle share of the whole time, a mean over the validators; None without any."""
    waits: dict[str, float]
    """Seconds in which the next step to close waited, by the role that it waited for."""
    intervals: tuple[Interval, ...]
    """Finished tasks of all processes; `to_json` leaves them out."""

    @property
    def trained(self) -> list[float]:
        """Times at which the training steps ended."""
        return [step.trained_at for step in self.steps if step.trained_at is not None]

    @property
    def steps_per_hour(self) -> float | None:
        """Steps an hour between the first and the last trained step; None with fewer than two."""
        times = self.trained
        return 3600.0 * (len(times) - 1) / (times[-1] - times[0]) if len(times) > 1 else None

    @property
    def wasted_share(self) -> float | None:
        """Wasted share of honest workers' rollouts; None if they made none."""
        honest = [group for group in self.groups if group.strategy == "honest"]
        sampled = sum(group.sampled for group in honest)
        return sum(group.wasted for group in honest) / sampled if sampled else None

    def to_json(self) -> dict[str, Any]:
        """Return plain data under stable keys, derived figures included."""
        found = asdict(replace(self, intervals=()))
        del found["intervals"]
        return {
            **found,
            "steps_per_hour": self.steps_per_hour,
            "wasted_share": self.wasted_share,
        }


@dataclass
class Record:
    """Counters of a simulated run's events, from which `result` is made.

    Args:
        group_size: rollouts of a group.
    """

    group_size: int
    steps: dict[int, StepResult] = field(default_factory=dict)
    trained_at: dict[int, float] = field(default_factory=dict)
    judged_at: dict[int, float] = field(default_factory=dict)
    """Time at which a step's first submission was judged."""
    sanctions: list[Sanction] = field(default_factory=list)
    waited: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    _counts: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    """Counts of leases (accepted, rejected, withheld) and of groups, by worker and name."""
    _waits: tuple[float, str] = (0.0, "the publisher")

    def take(self, before: State, event: events.Event) -> None:
        """Count an event.

        Args:
            before: the state before the event.
            event: the recorded event.
        """
        match event:
            case events.LeaseGranted(lease=lease):
                self._counts[lease.worker]["leases"] += 1
            case events.LeaseExpired(lease=digest):
                self._counts[before.leases[digest].lease.worker]["withheld"] += 1
            case events.SubmissionJudged(lease=digest, accepted=accepted, groups=groups):
                lease = before.leases[digest].lease
                self.judged_at.setdefault(lease.step, event.at)
                counts = self._counts[lease.worker]
                counts["accepted" if accepted else "rejected"] += 1
                counts["filtered"] += sum(group.outcome == "filtered" for group in groups)
            case events.StepClosed():
                self._close(before, event)
            case events.WorkerQuarantined(at=at, worker=worker, reason=reason):
                self.sanctions.append(Sanction(at, worker, "quarantined", reason))
            case events.QuarantineEnded(at=at, worker=worker):
                self.sanctions.append(Sanction(at, worker, "free", ""))
            case events.KeyBanned(at=at, key=worker, reason=reason):
                self.sanctions.append(Sanction(at, worker, "banned", reason))
            case _:
                pass

    def waits(self, now: float, state: State) -> None:
        """Add the time since the last call to the role that the next step to close waited for."""
        since, what = self._waits
        self.waited[what] += now - since
        said = "learner" if state.finished else waited_for(state).partition(" ")[0]
        self._waits = now, _WAITED_FOR.get(said, "a lease request")

    def result(
        self,
        seed: int,
        ended: str,
        now: float,
        coordinator: Coordinator,
        workers: Sequence[Worker],
        validators: int,
    ) -> Result:
        """Return the result of a run that ended."""
        self.waits(now, coordinator.state)
        stalled, times = coordinator.stalled, list(self.trained_at.values())
        span = times[-1] - times[0] if len(times) > 1 else 0.0
        busy_s: dict[tuple[str, str], float] = defaultdict(float)
        for each in coordinator.intervals:
            if each.role != LEARNER or each.end > times[0]:
                busy_s[each.role, each.member] += each.end - each.start
        checked_s = sum(seconds for (role, _), seconds in busy_s.items() if role == VALIDATORS)
        return Result(
            seed=seed,
            ended=ended,
            reason=stalled.reason if stalled else waited_for(coordinator.state),
            remedy=stalled.remedy if stalled else "",
            seconds=now,
            steps=tuple(
                StepResult(**{**vars(step), "trained_at": self.trained_at.get(number)})
                for number, step in self.steps.items()
            ),
            groups=tuple(self._groups(coordinator.state, workers, busy_s)),
            sanctions=tuple(self.sanctions),
            idle_learner=1.0 - busy_s[LEARNER, LEARNER] / span if span else 1.0,
            idle_validators=1.0 - checked_s / (validators * now) if validators and now else None,
            waits={what: seconds for what, seconds in self.waited.items() if seconds},
            intervals=tuple(coordinator.intervals),
        )

    def _groups(
        self, state: State, workers: Sequence[Worker], busy_s: Mapping[tuple[str, str], float]
    ) -> list[GroupResult]:
        pending: Counter[str] = Counter()
        for record in state.leases.values():
            if state.lag(record) <= state.policy.async_level:  # older ones are not judged any more
                lease, submitted = record.lease, record.status == "submitted"
                pending[lease.worker] += lease.groups if submitted else len(record.usable)
        by_group: dict[str, list[Worker]] = {}
        for worker in workers:
            by_group.setdefault(worker.member.group.name, []).append(worker)
        found = []
        for name, group in by_group.items():
            counts: Counter[str] = Counter()
            for worker in group:
                counts.update(self._counts[worker.key])
                counts["pending"] += pending[worker.key]
                counts["sampled"] += worker.sampled_groups
            used = counts["trained"] + counts["filtered"] + counts["pending"]
            present = sum(worker.present_s for worker in group)
            busy = sum(busy_s[worker.member.pool, worker.key] for worker in group)
            found.append(
                GroupResult(
                    name=name,
                    strategy=group[0].member.group.strategy.kind,
                    workers=len(group),
                    leases=counts["leases"],
                    accepted=counts["accepted"],
                    rejected=counts["rejected"],
                    withheld=counts["withheld"],
                    sampled=counts["sampled"] * self.group_size,
                    trained=counts["trained"] * self.group_size,
                    wasted=max(0, counts["sampled"] - used) * self.group_size,
                    idle=1.0 - busy / present if present else None,
                )
            )
        return found

    def _close(self, before: State, event: events.StepClosed) -> None:
        leases = [before.leases[group.lease].lease for group in event.trained]
        for lease in leases:
            self._counts[lease.worker]["trained"] += 1
        tally = before.tallies.get(event.step, Tally())
        self.steps[event.step] = StepResult(
            number=event.step,
            opened=before.steps[event.step].opened,
            first_rollouts=self.judged_at.get(event.step, event.at),
            closed=event.at,
            trained_at=None,
            groups=len(event.trained),
            leased=tally.leased_groups,
            withheld=tally.expired_groups,
            rejected=tally.rejected_rollouts // self.group_size,
            filtered=sum(grade.outcome == "filtered" for grade in tally.grades),
            lag=max((event.step - lease.version for lease in leases), default=0),
        )
