"""Coordinator of a simulated run, and the virtual clock.

It uses the pure decisions of `verify.coordinator` and records them as the coordinator's services
do, without signatures, files and HTTP.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection
from math import inf

from verify.coordinator.machine import filling
from verify.coordinator.machine.consequences import recorded
from verify.coordinator.machine.events import (
    CoordinatorStarted,
    Event,
    LeaseExpired,
    LeaseGranted,
    LeaseOverdue,
    LeaseReleased,
    NonceDrawn,
    StepClosed,
    SubmissionReceived,
    VersionPublished,
    WorkerRegistered,
)
from verify.coordinator.machine.stalls import Stalled
from verify.coordinator.machine.state import LeaseRecord, Policy, State
from verify.formats.lease import Lease


class Clock:
    """Virtual time in seconds since version 0 was published, and the scheduled actions.

    Actions run in order of time; actions of equal times run in the order of scheduling.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._count = 0
        self._actions: list[tuple[float, int, Callable[[], None]]] = []

    def at(self, time: float, action: Callable[[], None]) -> None:
        """Schedule an action at a time; infinite: never."""
        if time < inf:
            heapq.heappush(self._actions, (max(time, self.now), self._count, action))
            self._count += 1

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        """Schedule an action some seconds from now."""
        self.at(self.now + seconds, action)

    @property
    def next(self) -> float:
        """Time of the next action; infinite if there is none."""
        return self._actions[0][0] if self._actions else inf

    def run_next(self) -> None:
        """Advance to the next action and run it."""
        self.now, _, action = heapq.heappop(self._actions)
        action()


class Coordinator:
    """State machine of a run's coordinator.

    Args:
        policy: policy of the spec.
        backlog: `verify.backlog.submissions`.
        clock: clock of the run.
        observe: called with each event and the state before it.
    """

    def __init__(
        self,
        policy: Policy,
        backlog: int,
        clock: Clock,
        observe: Callable[[State, Event], None],
    ) -> None:
        self.state, self._backlog, self._clock = State(policy), backlog, clock
        self._observe, self._count = observe, 0
        self.stalled: Stalled | None = None
        self.record(CoordinatorStarted(clock.now))

    def record(self, event: Event) -> None:
        """Apply an event and its consequences."""
        before = self.state
        self.state, events = recorded(before, event)
        for new in events:
            self._observe(before, new)

    def register(self, key: str, pool: str, *, known: bool) -> None:
        """Register a key as a worker."""
        if key not in self.state.workers:
            self.record(WorkerRegistered(self._clock.now, key, pool, own=known))

    def publish(self, version: int) -> None:
        """Record a published version."""
        self.record(VersionPublished(self._clock.now, version, f"version {version}"))

    def lease(self, key: str, holding: Collection[str]) -> LeaseRecord | None:
        """Return a lease for a worker, as `leasing.Leasing` does; None if there is no work."""
        while True:
            now, state = self._clock.now, self.state
            decision = filling.decide_lease(state, key, now, holding=holding)
            match decision:
                case LeaseRecord():
                    return decision
                case None:
                    return None
                case _ if len(state.to_judge) >= self._backlog:
                    return None
                case filling.NonceNeeded(step):
                    self.record(NonceDrawn(now, step, self._name("nonce"), len(state.workers)))
                case LeaseOverdue():
                    self.record(decision)
                case Lease():
                    self.record(LeaseGranted(now, decision, self._name("lease"), ""))

    def release(self, digest: str) -> None:
        """Release an open lease."""
        record = self.state.leases.get(digest)
        if record is not None and record.status == "open":
            self.record(LeaseReleased(self._clock.now, digest))

    def submit(self, digest: str) -> bool:
        """Record a submission; returns False if the lease has ended."""
        record, now = self.state.leases.get(digest), self._clock.now
        if record is None or record.status != "open" or record.expires <= now:
            return False
        self.record(SubmissionReceived(now, digest, digest.replace("lease", "answer"), 1))
        return True

    def advance(self) -> None:
        """Expire leases and close steps, as `closing.Closing` does; set `stalled` in a stall."""
        now = self._clock.now
        for record in filling.expired_leases(self.state, now):
            self.record(LeaseExpired(now, record.digest))
        while decision := filling.decide_close(self.state, now):
            if isinstance(decision, Stalled):
                self.stalled = decision
                return
            self.record(StepClosed(now, decision.step, decision.groups, ""))

    @property
    def full(self) -> bool:
        """Whether the backlog of submissions is full, so that nothing is leased."""
        return len(self.state.to_judge) >= self._backlog

    def _name(self, kind: str) -> str:
        self._count += 1
        return f"{kind} {self._count}"
