"""A coordinator without IO: decisions turned into events, as the real one does, by hand."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from runspec.core.hashing import hash_parts
from verify.coordinator.machine import filling
from verify.coordinator.machine.consequences import consequences
from verify.coordinator.machine.events import (
    CoordinatorStarted,
    Event,
    GroupGrade,
    LeaseExpired,
    LeaseGranted,
    LeaseOverdue,
    LeaseReleased,
    NonceDrawn,
    StepClosed,
    SubmissionJudged,
    SubmissionReceived,
    VersionPublished,
    WorkerRegistered,
)
from verify.coordinator.machine.filling import Close, NonceNeeded
from verify.coordinator.machine.stalls import Stalled
from verify.coordinator.machine.state import LeaseRecord, Policy, State
from verify.coordinator.machine.transitions import apply
from verify.formats.lease import Lease

POLICY = Policy(
    run="run",
    steps=4,
    groups=4,
    group_size=2,
    async_level=2,
    zero_variance_filter=True,
    max_groups=12,
    min_groups=2,
    deadline_s=100.0,
    lease_timeout_s=30.0,
    groups_per_submission={"a": 2},
    prefill_share=1.0,
    prefill_floor=0.1,
    newcomer_groups=1000,
)


def digest(*parts: str | int) -> str:
    return hash_parts(*parts).hex()


def key(name: str) -> str:
    return digest("key", name)


def policy(**changes: object) -> Policy:
    return replace(POLICY, **changes)


def grade(group: int, outcome: str = "usable") -> GroupGrade:
    return GroupGrade(group, outcome, 2, 10, 4, 0.5, 0.25, 1.0, 0.01)  # type: ignore[arg-type]


class Filled:
    """State, clock and history of a pure run."""

    def __init__(self, policy: Policy = POLICY) -> None:
        self.now = 1000.0
        self.state = State(policy)
        self.events: list[Event] = []
        self.record(CoordinatorStarted(self.now))

    def record(self, event: Event) -> None:
        self.state = apply(self.state, event)
        self.events.append(event)
        for follows in consequences(self.state, event):
            self.state = apply(self.state, follows)
            self.events.append(follows)

    def register(self, name: str, pool: str = "a", *, own: bool = True) -> None:
        """Registers a worker of the run's own, or a stranger."""
        self.record(WorkerRegistered(self.now, key(name), pool, own=own))

    def publish(self, version: int) -> None:
        self.record(VersionPublished(self.now, version, digest("manifest", version)))

    def lease(self, name: str, *, holding: Collection[str] = ()) -> LeaseRecord | None:
        while True:
            decision = filling.decide_lease(self.state, key(name), self.now, holding=holding)
            match decision:
                case None:
                    return None
                case LeaseRecord():
                    return decision
                case LeaseOverdue():
                    self.record(decision)
                case NonceNeeded(step):
                    draw = digest("nonce", step, len(self.events))
                    self.record(NonceDrawn(self.now, step, draw, len(self.state.workers)))
                case Lease():
                    name_of = digest("lease", decision.seed.hex())
                    self.record(LeaseGranted(self.now, decision, name_of, "signed"))

    def release(self, record: LeaseRecord) -> None:
        self.record(LeaseReleased(self.now, record.digest))

    def submit(self, record: LeaseRecord) -> None:
        self.record(SubmissionReceived(self.now, record.digest, digest("s", record.digest), 1))

    def judge(
        self,
        record: LeaseRecord,
        outcomes: Sequence[str] | None,
        *,
        reason: str = "logprobs: 0.05 > 0.01",
        recomputed: bool = True,
        task_reward: float = 0.5,
        fault: str = "",
    ) -> None:
        """`outcomes`: of each group; None rejects the submission, for `reason`."""
        diff = 0.01 if recomputed else None
        groups = tuple(
            replace(grade(i, outcome), logprob_diff=diff, task_reward=task_reward)
            for i, outcome in enumerate(outcomes or ())
        )
        reason = "" if outcomes else reason
        self.record(
            SubmissionJudged(
                *(self.now, record.digest, digest("s", record.digest), digest("v", record.digest)),
                *(key("validator"), outcomes is not None, reason, groups),
                fault=fault,
            )
        )

    def answer(self, record: LeaseRecord, outcome: str = "usable") -> None:
        """Submits and judges a lease, all groups alike; `rejected` rejects it."""
        self.submit(record)
        self.judge(record, None if outcome == "rejected" else [outcome] * record.lease.groups)

    def work(self, name: str, outcome: str = "usable") -> LeaseRecord:
        record = self.lease(name)
        assert record is not None
        self.answer(record, outcome)
        return record

    def advance(self) -> list[Close]:
        """What the clock of the coordinator does: expiries, then closings."""
        for record in filling.expired_leases(self.state, self.now):
            self.record(LeaseExpired(self.now, record.digest))
        closed = []
        while isinstance(decision := filling.decide_close(self.state, self.now), Close):
            self.record(StepClosed(self.now, decision.step, decision.groups, "signed"))
            closed.append(decision)
        return closed

    def stalled(self) -> str:
        decision = filling.decide_close(self.state, self.now)
        assert isinstance(decision, Stalled), decision
        return decision.reason


def started(**changes: object) -> Filled:
    """A run of two workers of its own, x and y, whose first version is out."""
    run = Filled(policy(**changes))
    run.register("x")
    run.register("y")
    run.publish(0)
    return run
