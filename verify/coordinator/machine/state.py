"""The state of a run: plain frozen data, which `transitions.apply` makes from events.

`Policy` has the parts of the spec that the state machine needs.

Maps with an entry for each key are `HashTrieMap`s, because an insert shares the other entries. With
copies of a `dict` a start would take time quadratic in the keys. What follows from all leases is
kept with them (`leases`).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

from rpds import HashTrieMap

from runspec.core.schema import Fill, RunSpec
from verify.coordinator.machine.events import GroupGrade, VersionPublished
from verify.coordinator.machine.islands import IslandPolicy, IslandState
from verify.coordinator.machine.leases import LeaseRecord, Leases, Rank
from verify.coordinator.machine.trust import Standing, prefill_share
from verify.formats.batch import rows_per_step
from verify.thresholds import GapNoise

FilterBy = Literal["task", "whole"] | None
"""Rewards that filter a group of which all are equal: of the task, or with the length term."""


@dataclass(frozen=True)
class Policy:
    """How steps fill, and how far workers are trusted; durations in seconds."""

    run: str
    """Name of the run."""
    steps: int
    async_level: int
    """Largest lag of a step behind the newest published version."""
    deadline_s: float
    lease_timeout_s: float
    prefill_share: float
    """Share of a new key's submissions to recompute."""
    prefill_floor: float
    """The share with the best reputation."""
    islands: IslandPolicy | None = None
    """None: the learner is one program."""
    rows_per_step: int = 0
    """Packed rows of a step of a run that trains on documents and has no workers; 0: it samples."""
    groups: int = 0
    """Groups a step asks for (`prompts_per_step`); 0 without workers, as what follows."""
    group_size: int = 0
    filter_by: FilterBy = None
    max_groups: int = 0
    """Largest number of a step's groups that known workers are leased."""
    min_groups: int = 0
    """Fewest groups of a batch."""
    groups_per_submission: Mapping[str, int] = field(default_factory=dict)
    """Groups of a submission, by pool."""
    newcomer_groups: int = 0
    """Groups of a step that new workers may hold together."""

    @classmethod
    def of(cls, spec: RunSpec) -> Policy:
        common: dict[str, Any] = {
            "run": spec.name,
            "steps": spec.steps,
            "lease_timeout_s": spec.verify.lease_timeout,
            "prefill_share": spec.verify.prefill_share,
            "prefill_floor": spec.verify.lowest_prefill_share,
            "islands": IslandPolicy.of(spec),
        }
        if spec.supervised is not None:
            islands = spec.learner.islands
            overlap = 0 if islands is None else islands.overlap  # versions are committed so late
            return cls(
                **common,
                # The learner trains on while a version is published, and at most one more waits.
                async_level=2 * spec.supervised.publish_every - 1 + overlap,
                deadline_s=Fill().deadline,
                rows_per_step=rows_per_step(spec),
            )
        algorithm, fill, groups = spec.grpo, spec.grpo.fill, spec.grpo.prompts_per_step
        return cls(
            **common,
            async_level=algorithm.async_level,
            deadline_s=fill.deadline,
            groups=groups,
            group_size=algorithm.group_size,
            filter_by=algorithm.filters.rewards if algorithm.filters.zero_variance else None,
            max_groups=int(fill.max_groups * groups),
            min_groups=max(1, math.ceil(fill.min_share * groups - 1e-9)),
            groups_per_submission={p.name: p.groups_per_submission for p in spec.samplers},
            newcomer_groups=max(1, int(spec.verify.newcomer_share * groups + 1e-9)),
        )


@dataclass(frozen=True)
class Pace:
    """The longest times that a worker took lately, in seconds."""

    lease_s: float
    group_s: float
    """Seconds a group, on average over a lease."""

    def after(self, lease_s: float, groups: int) -> Pace:
        """Return the pace after another lease: a longer time at once, a shorter one slowly."""
        pairs = (self.lease_s, lease_s), (self.group_s, lease_s / groups)
        return Pace(*(max(now, 0.8 * before + 0.2 * now) for before, now in pairs))

    def seconds(self, groups: int) -> float:
        """Return the longest time that a lease of some groups should take."""
        return max(self.lease_s, groups * self.group_s)


@dataclass(frozen=True)
class Worker:
    """A registered key and what it has earned."""

    number: int
    """0, 1, 2, ... in the order of registration."""
    pool: str
    invite: str | None = None
    """Public key of the invite with which it registered."""
    own: bool = False
    """Whether it is one of the run's own."""
    revoked: bool = False
    """Whether its invite was revoked. It then counts as a stranger."""
    devices: str = ""
    """See `Lease.devices`."""
    probation: bool = False
    """Whether its work is recomputed and not trained on: no profile covers its devices."""
    served: float = 0.0
    """Time of its last lease; 0: never."""
    pace: Pace | None = None
    """None before its first accepted submission."""
    accepted_rollouts: int = 0
    accepted_tokens: int = 0
    """Its credits: output tokens of accepted groups, filtered groups included."""
    standing: Standing = field(default_factory=Standing)
    gap_excess: float = 0.0
    """Sum of the excesses of its submissions since the sum was last below 0, nats."""
    gap_noise: GapNoise | None = None
    """Noise of the calibration by which the sum was computed (`verdicts`)."""

    @cached_property
    def rank(self) -> Rank:
        """Rank now; a lease keeps the rank that its worker had when it was granted."""
        if self.standing.quarantine is not None or self.probation:
            return Rank.NEW
        if self.own or (self.invite is not None and not self.revoked):
            return Rank.KNOWN
        return Rank.RECORDED if self.standing.trust else Rank.NEW

    @property
    def unproven(self) -> bool:
        """Whether it is a stranger without an accepted submission."""
        return not self.own and self.invite is None and self.standing.accepted == 0

    def excess_with(self, excess: float, noise: GapNoise) -> float:
        """Return the sum of the excesses with that of another submission, nats.

        A sum belongs to one calibration.
        """
        return excess + (self.gap_excess if self.gap_noise == noise else 0.0)

    def with_gaps(self, excess: float | None, noise: GapNoise | None) -> Worker:
        """Return the worker with the gaps of a submission, accepted or not."""
        if excess is None or noise is None:
            return self
        total = min(max(0.0, self.excess_with(excess, noise)), noise.largest_excess)
        return replace(self, gap_excess=total, gap_noise=noise)


@dataclass(frozen=True)
class Draw:
    nonce: str
    workers: int
    """The draw covers workers with smaller numbers, except those of the step's earlier draws."""


@dataclass(frozen=True)
class OpenStep:
    opened: float
    since: float
    """Start of the deadline: `opened`, or the coordinator's last start."""
    draws: tuple[Draw, ...]
    leased: int = 0
    """Groups leased to known workers; failed groups count, groups given back do not."""
    next_index: HashTrieMap[str, int] = field(default_factory=HashTrieMap)

    def nonce_for(self, worker: Worker) -> str | None:
        return next((d.nonce for d in self.draws if worker.number < d.workers), None)


@dataclass(frozen=True)
class Tally:
    """Counts for one batch manifest; a late group counts in the step in which it was decided."""

    leased_groups: int = 0
    expired_groups: int = 0
    """Groups that were withheld, accepted too late to train within the lag, or struck: accepted
    without being recomputed, from a worker that was put into quarantine or banned later."""
    set_aside_groups: int = 0
    """Groups of submissions at which validators failed."""
    rejected_submissions: int = 0
    rejected_rollouts: int = 0
    last_rejection: str = ""
    grades: tuple[GroupGrade, ...] = ()


@dataclass(frozen=True)
class State:
    policy: Policy
    newest: VersionPublished | None = None
    workers: HashTrieMap[str, Worker] = field(default_factory=HashTrieMap)
    unproven: int = 0
    """How many of `workers` are."""
    rank_changes: int = 0
    """How often the rank of a worker has changed."""
    bans: HashTrieMap[str, str] = field(default_factory=HashTrieMap)
    """Why a key is banned, whether it is a worker's yet or not."""
    invited: HashTrieMap[str, int] = field(default_factory=HashTrieMap)
    """How many keys were registered with an invite, by its public key."""
    revoked: HashTrieMap[str, str] = field(default_factory=HashTrieMap)
    """Why an invite was revoked, by its public key."""
    steps: Mapping[int, OpenStep] = field(default_factory=dict)
    """The open steps, in order."""
    leases: Leases = field(default_factory=Leases)
    """Leases of steps closed long ago are left out."""
    typical: Mapping[str, float] = field(default_factory=dict)
    """Seconds a group that workers of a pool took lately, by pool; without those of new workers."""
    tallies: Mapping[int, Tally] = field(default_factory=dict)
    next_step: int = 0
    """The next step to open."""
    next_close: int = 0
    closed: float = 0.0
    """Time at which the last step closed."""
    step_s: float = 0.0
    """Seconds between the last closings of steps, on average; 0: not known yet."""
    progress: float = 0.0
    """Time of the last start, published version or closed step."""
    dropped_groups: int = 0
    """Groups of all steps that were lost to faults of the grader."""
    last_fault: str = ""
    """The grader's error at the newest of these groups."""
    islands: IslandState = field(default_factory=IslandState)
    """State of the learner islands; unused in a run with one learner."""

    @property
    def finished(self) -> bool:
        return self.next_close >= self.policy.steps

    @property
    def oldest_remembered(self) -> int:
        """The oldest step whose leases are all still in `leases`.

        No group of an older step can train any more. One more step is kept, so that a submission
        that is sent again finds its lease.
        """
        return self.next_close - self.policy.async_level - 1

    @property
    def live(self) -> Collection[LeaseRecord]:
        """Leases that are undecided or have groups to train, in lease order; few of all leases."""
        return self.leases.live.values()

    @cached_property
    def to_judge(self) -> Sequence[LeaseRecord]:
        """Submitted leases that can still train, in lease order, those of known workers first."""
        submitted = self.leases.submitted.values()
        in_time = (r for r in submitted if self.lag(r) <= self.policy.async_level)
        return sorted(in_time, key=lambda record: record.rank is not Rank.KNOWN)

    def newest_accepted(self) -> str | None:
        """Return the newest accepted submission whose weights and files are there."""
        for record in reversed(list(self.leases.values())):
            if record.status == "accepted" and self.lag(record) <= self.policy.async_level:
                return record.submission
        return None

    def share_of(self, worker: str) -> float:
        """Return the chance that a submission of a worker is recomputed."""
        if worker in self.bans or self.workers[worker].probation:
            return 1.0
        start, floor = self.policy.prefill_share, self.policy.prefill_floor
        return prefill_share(self.workers[worker].standing, start=start, floor=floor)

    def lag(self, record: LeaseRecord) -> int:
        """Return the lag of a lease's groups if the next step to close trains them."""
        return self.next_close - record.lease.version
