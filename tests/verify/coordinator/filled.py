"""A coordinator without IO: decisions turned into events, as the real one does, by hand; and its
handlers without HTTP, over a real ledger and a clock of the test's choice."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Collection, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from hypothesis import HealthCheck, settings

from runspec.core.canonical import hash_parts
from runspec.core.roles import Roles
from runspec.core.schema import Backlog as BacklogLimits
from runspec.core.schema import RunSpec
from runspec.core.signed import SigningKey
from tests.verify.coordinator.deployment import RUN
from verify.coordinator.authentication import Authentication, Limiter
from verify.coordinator.handlers import Backlog, RunContext
from verify.coordinator.handlers.registering import Registering
from verify.coordinator.journal import Journal
from verify.coordinator.machine import events, filling
from verify.coordinator.machine.consequences import recorded
from verify.coordinator.machine.filling import Close, NonceNeeded
from verify.coordinator.machine.leases import LeaseRecord
from verify.coordinator.machine.stalls import Stalled
from verify.coordinator.machine.state import Policy, State
from verify.coordinator_http import RequestChecker
from verify.formats.lease import Lease

STEADY = settings(stateful_step_count=40, derandomize=True, suppress_health_check=list(HealthCheck))
"""Of the state machines of these tests."""
POLICY = Policy(
    run="run",
    steps=4,
    groups=4,
    group_size=2,
    async_level=2,
    filter_by="task",
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


FAILED = (events.FailedAttempt(1.0, key("validator"), "its process ended"),)


def policy(**changes: object) -> Policy:
    return replace(POLICY, **changes)


def submission_of(record: LeaseRecord) -> str:
    """Digest of the submission that answers a lease."""
    return digest("s", record.digest)


class Filled:
    """State, clock and history of a pure run."""

    def __init__(self, policy: Policy = POLICY) -> None:
        self.now = 1000.0
        self.state = State(policy)
        self.events: list[events.Event] = []
        self.record(events.CoordinatorStarted(self.now))

    def record(self, event: events.Event) -> None:
        self.state, events = recorded(self.state, event)
        self.events += events

    def register(self, name: str, pool: str = "a", *, own: bool = True) -> None:
        """Registers a worker of the run's own, or a stranger."""
        self.record(events.WorkerRegistered(self.now, key(name), pool, own=own))

    def publish(self, version: int) -> None:
        self.record(events.VersionPublished(self.now, version, digest("manifest", version)))

    def lease(self, name: str, *, holding: Collection[str] = ()) -> LeaseRecord | None:
        while True:
            decision = filling.decide_lease(self.state, key(name), self.now, holding=holding)
            match decision:
                case None:
                    return None
                case LeaseRecord():
                    return decision
                case events.LeaseOverdue():
                    self.record(decision)
                case NonceNeeded(step):
                    draw = digest("nonce", step, len(self.events))
                    self.record(events.NonceDrawn(self.now, step, draw, len(self.state.workers)))
                case Lease():
                    name_of = digest("lease", decision.seed.hex())
                    self.record(events.LeaseGranted(self.now, decision, name_of, "signed"))

    def further(self, name: str) -> LeaseRecord | None:
        """A lease beside those that the worker holds."""
        return self.lease(name, holding=list(self.state.leases))

    def release(self, record: LeaseRecord) -> None:
        self.record(events.LeaseReleased(self.now, record.digest))

    def submit(self, record: LeaseRecord) -> None:
        event = events.SubmissionReceived(self.now, record.digest, submission_of(record), 1)
        self.record(event)

    def submitted(self, name: str) -> LeaseRecord:
        record = self.lease(name)
        assert record is not None
        self.submit(record)
        return record

    def set_aside(self, record: LeaseRecord) -> None:
        submission = submission_of(record)
        self.record(events.SubmissionSetAside(self.now, record.digest, submission, FAILED))

    def judge(
        self,
        record: LeaseRecord,
        outcomes: Sequence[str] | None,
        *,
        reason: str = "logprobs: 0.05 > 0.01",
        recomputed: bool = True,
        task_reward: float = 0.5,
        answered: int = 2,
        fault: str = "",
    ) -> None:
        """`outcomes`: of each group; None rejects the submission, for `reason`."""
        diff = 0.01 if recomputed else None
        groups = tuple(
            events.GroupGrade(*(i, outcome, 2, 10, 4, task_reward, 0.25, 1.0, diff, answered))  # type: ignore[arg-type]
            for i, outcome in enumerate(outcomes or ())
        )
        reason = "" if outcomes else reason
        self.record(
            events.SubmissionJudged(
                *(self.now, record.digest, submission_of(record), digest("v", record.digest)),
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
            self.record(events.LeaseExpired(self.now, record.digest))
        closed = []
        while isinstance(decision := filling.decide_close(self.state, self.now), Close):
            self.record(events.StepClosed(self.now, decision.step, decision.groups, "signed"))
            closed.append(decision)
        return closed

    def stalled(self) -> Stalled:
        decision = filling.decide_close(self.state, self.now)
        assert isinstance(decision, Stalled), decision
        return decision


def started(**changes: object) -> Filled:
    """A run of two workers of its own, x and y, whose first version is out."""
    run = Filled(policy(**changes))
    run.register("x")
    run.register("y")
    run.publish(0)
    return run


# -- Handlers without HTTP -----------------------------------------------------------------------


def roles_of(*, coordinator: Iterable[str] = (), validator: Iterable[str] = ()) -> Roles:
    """Roles without an end."""
    nobody = frozenset[str]()
    return Roles(RUN, 0.0, 1e12, nobody, frozenset(coordinator), frozenset(validator))


def journal_of(run: Filled, folder: Path, clock: Callable[[], float] | None = None) -> Journal:
    """A journal that holds the events of a pure run; its clock is the run's, if none is given."""
    journal = Journal(folder, run.state.policy, clock=clock or (lambda: run.now))
    for event in run.events:
        journal.record(event)
    return journal


def context_of(
    journal: Journal,
    spec: RunSpec,
    key: SigningKey | None = None,
    roles: Roles | None = None,
    *,
    limits: BacklogLimits | None = None,
    free_bytes: Callable[[], int] = lambda: 1 << 50,
) -> RunContext:
    """A run as its handlers see it, on a disk of this size."""
    roles = roles or roles_of()
    backlog = Backlog(journal, limits or spec.verify.backlog, free_bytes=lambda _: free_bytes())
    authentication = Authentication(journal, RequestChecker(RUN), Limiter(), roles, ())
    key = key or SigningKey.generate()
    return RunContext(journal, spec, key, roles, authentication, backlog)


def registering_of(run: RunContext) -> Registering:
    """Who registers workers of a run without workers of its own."""
    return Registering(run, (), Limiter())


async def chunks(body: bytes) -> AsyncIterator[bytes]:
    """A body as the server gives it."""
    yield body
