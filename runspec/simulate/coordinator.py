"""Coordinator of a simulated run.

It uses the pure decisions of `verify.coordinator` and records them as the coordinator's handlers
do, without signatures, files and HTTP.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from itertools import chain

from runspec.simulate.model import Clock, Interval, Lengths, Model
from runspec.simulate.population import Content
from verify.coordinator.machine import events, filling
from verify.coordinator.machine.stalls import Stalled
from verify.coordinator.machine.state import LeaseRecord, Policy, State
from verify.coordinator.machine.transitions import recorded
from verify.formats.lease import Lease


class Coordinator:
    """State machine of a run's coordinator, and what the simulation adds to its state.

    Args:
        policy: policy of the spec.
        backlog: `verify.backlog.submissions`.
        model: drawn lengths and filtered groups.
        observe: called with each event and the state before it.
    """

    def __init__(
        self,
        policy: Policy,
        backlog: int,
        model: Model,
        observe: Callable[[State, events.Event], None],
    ) -> None:
        self.state, self.clock = State(policy), Clock()
        self.stalled: Stalled | None = None
        self.waiting: dict[str, None] = {}
        """Keys of the workers that wait for a lease, in the order of their requests."""
        self.touched = True
        """Whether the roles may have work since they last acted."""
        self.contents: dict[str, Content] = {}
        """Contents of the submissions, by the digest of the lease."""
        self.intervals: list[Interval] = []
        """Tasks of all roles; one that a departure or a failure cut off is left out."""
        self._backlog, self._model, self._observe, self._count = backlog, model, observe, 0
        self._groups: dict[str, tuple[int, range]] = {}
        """Step and numbers of the groups of each lease."""
        self._leased: dict[int, int] = {}
        """Leased groups of each step."""
        self.record(events.CoordinatorStarted(self.clock.now))

    def record(self, event: events.Event) -> None:
        """Apply an event and its consequences."""
        before = self.state
        self.state, events = recorded(before, event)
        self.touched = True
        for new in events:
            self._observe(before, new)

    def register(self, key: str, pool: str, *, known: bool) -> None:
        """Register a key as a worker."""
        if key not in self.state.workers:
            self.record(events.WorkerRegistered(self.clock.now, key, pool, own=known))

    def publish(self, version: int) -> None:
        """Record a published version."""
        self.record(events.VersionPublished(self.clock.now, version, f"version {version}"))

    def lease(self, key: str, holding: Collection[str]) -> LeaseRecord | None:
        """Return a lease for a worker, as `leasing.Leasing` does; None if there is no work."""
        while True:
            now, state = self.clock.now, self.state
            decision = filling.decide_lease(state, key, now, holding=holding)
            match decision:
                case LeaseRecord():
                    return decision
                case None:
                    return None
                case _ if self.full:
                    return None
                case filling.NonceNeeded(step):
                    self.record(
                        events.NonceDrawn(now, step, self._name("nonce"), len(state.workers))
                    )
                case events.LeaseOverdue():
                    self.record(decision)
                case Lease(step=step, groups=groups):
                    digest, first = self._name("lease"), self._leased.get(step, 0)
                    self._leased[step] = first + groups
                    self._groups[digest] = step, range(first, first + groups)
                    self.record(events.LeaseGranted(now, decision, digest, ""))

    def release(self, digest: str) -> None:
        """Release an open lease."""
        record = self.state.leases.get(digest)
        if record is not None and record.status == "open":
            self.record(events.LeaseReleased(self.clock.now, digest))

    def submit(self, digest: str, content: Content) -> None:
        """Record the answer to a lease; refuse it after the lease's end."""
        record, now = self.state.leases.get(digest), self.clock.now
        if record is not None and record.status == "open" and record.expires > now:
            self.contents[digest] = content
            self.record(
                events.SubmissionReceived(now, digest, digest.replace("lease", "answer"), 1)
            )

    def ask(self, key: str) -> None:
        """Add a worker to those that wait for a lease."""
        if not self.state.finished:
            self.waiting[key] = None
            self.touched = True

    def lengths(self, digest: str) -> Lengths:
        """Return the output tokens of each rollout of a lease."""
        step, groups = self._groups[digest]
        return tuple(chain.from_iterable(self._model.lengths(step, group) for group in groups))

    def filtered(self, digest: str, group: int) -> bool:
        """Return whether the filter drops a group of a lease."""
        step, groups = self._groups[digest]
        return self._model.filtered(step, groups[group])

    def advance(self) -> None:
        """Expire leases and close steps, as `closing.Closing` does; set `stalled` in a stall."""
        now = self.clock.now
        for record in filling.expired_leases(self.state, now):
            self.record(events.LeaseExpired(now, record.digest))
        while decision := filling.decide_close(self.state, now):
            if isinstance(decision, Stalled):
                self.stalled = decision
                return
            self.record(events.StepClosed(now, decision.step, decision.groups, ""))

    @property
    def full(self) -> bool:
        """Whether the backlog of submissions is full, so that nothing is leased."""
        return len(self.state.to_judge) >= self._backlog

    def _name(self, kind: str) -> str:
        self._count += 1
        return f"{kind} {self._count}"
