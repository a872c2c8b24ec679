"""The state of a run: plain frozen data, which `transitions.apply` makes from events.

Maps with an entry for each key are `HashTrieMap`s: a map with one more entry shares the others,
while copies of a `dict` would make a start take time quadratic in the keys. An event wakes all who
wait for a lease, so what each of them needs of all keys or leases is counted once.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from rpds import HashTrieMap, HashTrieSet

from verify.coordinator.events import FailedAttempt, GroupGrade, VersionPublished
from verify.coordinator.policy import Policy
from verify.coordinator.reputation import Standing, prefill_share
from verify.formats.lease import Lease
from verify.gap_noise import GapNoise


@dataclass(frozen=True)
class Worker:
    """A registered key and what it has earned."""

    number: int
    """0, 1, 2, ... in the order of registration."""
    pool: str
    invite: str | None = None
    """Public key of the invite by which it came."""
    accepted_rollouts: int = 0
    accepted_tokens: int = 0
    """Its credits: output tokens of accepted groups, filtered ones included."""
    standing: Standing = field(default_factory=Standing)
    gap_excess: float = 0.0
    """Excess of its submissions together since the sum was last below 0, nats (`gap_history`)."""
    gap_noise: GapNoise | None = None
    """Noise of the calibration that the sum belongs to."""

    @property
    def unproven(self) -> bool:
        """Whether it came without an invite and never had a submission accepted."""
        return self.invite is None and self.standing.accepted == 0


@dataclass(frozen=True)
class Draw:
    nonce: str
    workers: int
    """Covers workers with a smaller number that no earlier draw of the step covers."""


@dataclass(frozen=True)
class OpenStep:
    opened: float
    since: float
    """Start of the deadline: `opened`, or the coordinator's last start."""
    draws: tuple[Draw, ...]
    leased: int = 0
    """Groups, failed ones included; without those that were given back."""
    given_back: int = 0
    """Groups whose holders left, and did not come back."""
    next_index: HashTrieMap[str, int] = field(default_factory=HashTrieMap)
    rejected: HashTrieMap[str, int] = field(default_factory=HashTrieMap)
    """For each worker the groups of its rejected submissions."""

    def nonce_for(self, worker: Worker) -> str | None:
        return next((d.nonce for d in self.draws if worker.number < d.workers), None)


@dataclass(frozen=True)
class LeaseRecord:
    lease: Lease
    digest: str
    document: str
    status: Literal[
        "open", "released", "submitted", "accepted", "rejected", "set_aside", "expired"
    ] = "open"
    submission: str | None = None
    verdict: str | None = None
    usable: tuple[int, ...] = ()
    """Groups that may be trained on and have not been."""
    newcomer: bool = False
    """Whether its worker was a newcomer when it was granted (`Standing.newcomer`)."""
    recomputed: bool = False
    """Whether its rollouts were recomputed before they were accepted."""
    resumed: bool = False
    """Whether its holder gave it back and took it up again."""
    deferred: str | None = None
    """The submission that its holder was told to send later."""
    deferred_until: float = 0.0
    attempts: tuple[FailedAttempt, ...] = ()
    """Failed attempts for which the submission was set aside."""

    @property
    def expires(self) -> float:
        """When it ends: the lease's own time, or until when it was deferred."""
        return max(self.lease.expires, self.deferred_until)

    @property
    def outstanding(self) -> bool:
        return self.status in ("open", "submitted")


@dataclass(frozen=True)
class Tally:
    """Counts for one batch manifest; late work counts in the step in which it was decided."""

    leased_groups: int = 0
    expired_groups: int = 0
    """Withheld, accepted too late to train within the lag, or struck: not recomputed, of a worker
    that was caught since."""
    set_aside_groups: int = 0
    """Groups of submissions at which validators failed."""
    rejected_submissions: int = 0
    rejected_rollouts: int = 0
    last_rejection: str = ""
    grades: tuple[GroupGrade, ...] = ()


@dataclass
class NewcomerGroups:
    """Groups of a step that were leased to newcomers and not accepted."""

    held: int = 0
    """Groups still to be decided."""
    failed: list[tuple[float, int]] = field(default_factory=list)
    """Groups not delivered: until when they count, and how many."""


@dataclass(frozen=True)
class State:
    policy: Policy
    newest: VersionPublished | None = None
    workers: HashTrieMap[str, Worker] = field(default_factory=HashTrieMap)
    named: HashTrieSet[str] = field(default_factory=HashTrieSet)
    """The keys of `workers` that are no newcomers, banned ones included."""
    unproven: int = 0
    """How many of `workers` are."""
    bans: HashTrieMap[str, str] = field(default_factory=HashTrieMap)
    """Why a key is banned, whether it is a worker's yet or not."""
    invited: HashTrieMap[str, int] = field(default_factory=HashTrieMap)
    """How many keys were registered with an invite, by its public key."""
    revoked: HashTrieMap[str, str] = field(default_factory=HashTrieMap)
    """Why an invite was revoked, by its public key, whether anybody came with it or not."""
    steps: Mapping[int, OpenStep] = field(default_factory=dict)
    """The open ones, in order."""
    leases: Mapping[str, LeaseRecord] = field(default_factory=dict)
    """Leases by digest, in lease order; those of steps long closed are forgotten."""
    tallies: Mapping[int, Tally] = field(default_factory=dict)
    next_step: int = 0
    """The next to open."""
    next_close: int = 0
    progress: float = 0.0
    """Time of the last start, published version or closed step."""
    dropped_groups: int = 0
    """Groups lost to faults of the grader, of all steps."""
    last_fault: str = ""
    """What the grader failed with at the newest of them."""

    @property
    def finished(self) -> bool:
        return self.next_close >= self.policy.steps

    @property
    def oldest_remembered(self) -> int:
        """All leases of this step and later ones are still in `leases`.

        No group of an older step can train any more. It is one step longer than that, so that a
        submission that is sent again finds its lease.
        """
        return self.next_close - self.policy.async_level - 1

    @cached_property
    def unsettled(self) -> Mapping[str, Sequence[LeaseRecord]]:
        """Open, released and submitted leases by worker, in lease order."""
        found: dict[str, list[LeaseRecord]] = defaultdict(list)
        for record in self.leases.values():
            if record.status in ("open", "released", "submitted"):
                found[record.lease.worker].append(record)
        return found

    @cached_property
    def to_judge(self) -> Sequence[LeaseRecord]:
        """Submitted leases that can still train, in lease order."""
        submitted = (r for r in self.leases.values() if r.status == "submitted")
        return [r for r in submitted if self.lag(r) <= self.policy.async_level]

    @cached_property
    def outstanding(self) -> Counter[int]:
        """Groups that nobody has decided, by the step of their leases."""
        groups: Counter[int] = Counter()
        for records in self.unsettled.values():
            for record in records:
                groups[record.lease.step] += record.lease.groups if record.outstanding else 0
        return groups

    @cached_property
    def usable(self) -> Counter[int]:
        """Groups that may be trained on and have not been, by the step of their leases."""
        groups: Counter[int] = Counter()
        for record in self.leases.values():
            groups[record.lease.step] += len(record.usable)
        return groups

    @cached_property
    def newcomers(self) -> Mapping[int, NewcomerGroups]:
        """Groups of newcomers, by step."""
        found: dict[int, NewcomerGroups] = defaultdict(NewcomerGroups)
        for record in self.leases.values():
            if record.newcomer and record.status != "accepted":
                of_step = found[record.lease.step]
                if record.outstanding:
                    of_step.held += record.lease.groups
                else:
                    until = record.expires + self.policy.lease_timeout_s
                    of_step.failed.append((until, record.lease.groups))
        return found

    def share_of(self, worker: str) -> float:
        """How likely a submission of a worker's is to be recomputed."""
        if worker in self.bans:
            return 1.0
        start, floor = self.policy.prefill_share, self.policy.prefill_floor
        return prefill_share(self.workers[worker].standing, start=start, floor=floor)

    def lag(self, record: LeaseRecord) -> int:
        """Lag of the record's groups if the next step to close trains them."""
        return self.next_close - record.lease.version
