"""Worker of a simulated run: presence, engine and leases."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from runspec.simulate.coordinator import Coordinator
from runspec.simulate.fleet import Answer, Content, Member
from runspec.simulate.model import BROADCAST, Interval
from runspec.simulate.population import Absence
from verify.coordinator.machine.state import LeaseRecord
from verify.formats.lease import Lease


class Worker:
    """One member of the population.

    Args:
        member: its engine, links and strategy.
        coordinator: the coordinator of the run.
        request_s: seconds of one request to the coordinator.
    """

    def __init__(self, member: Member, coordinator: Coordinator, request_s: float) -> None:
        self.member, self.key = member, member.key
        self._coordinator, self._clock = coordinator, coordinator.clock
        self._request_s = request_s
        self.present = False
        self.sampled_groups = 0
        self.present_s = 0.0
        self._since = 0.0
        self._life = 0
        """Number of departures; actions scheduled before a departure do not run."""
        self._held: set[str] = set()
        self._queue: deque[tuple[str, Lease, Answer]] = deque()
        self._working = False
        self._have: set[int] = set()
        self._loaded: int | None = None
        self._fetching: int | None = None

    # Presence.

    def plan_presence(self) -> None:
        """Schedule its first arrival and its absences."""
        group, rng, clock = self.member.group, self.member.rng, self._clock
        clock.at((group.arrives or 0.0) + rng.uniform(0.0, group.over or 0.0), self._arrive)
        for absence in group.absent:
            self._plan_absence(absence, absence.begins)

    def _plan_absence(self, absence: Absence, begins: float) -> None:
        def begin() -> None:
            self._plan_absence(absence, begins + absence.every)
            if self.present and self.member.rng.random() < absence.share:
                self._depart(back_after=absence.lasts)

        self._clock.at(begins, begin)

    def _arrive(self) -> None:
        group, clock = self.member.group, self._clock
        self.present, self._since = True, clock.now
        self._coordinator.register(self.key, self.member.pool, known=group.known)
        self.fetch()
        if group.stays is not None:
            away = self._drawn(group.away)
            self._later(self._drawn(group.stays), lambda: self._depart(back_after=away))
        self._ask()

    def _depart(self, back_after: float) -> None:
        """Leave, and return later; unless it crashes, it releases its leases."""
        self._life += 1
        self.end()
        self.present, self._working, self._fetching = False, False, None
        self._coordinator.waiting.pop(self.key, None)
        if self.member.rng.random() >= self.member.group.crashes:
            for record in self._coordinator.state.unsettled.get(self.key, ()):
                self._coordinator.release(record.digest)
        self._queue.clear()
        self._held.clear()
        self._clock.after(back_after, self._arrive)

    def end(self) -> None:
        """Add the time since its arrival to its presence."""
        if self.present:
            self.present_s += self._clock.now - self._since
            self._since = self._clock.now

    def holding(self) -> set[str]:
        """Return the digests of its leases; none after a departure."""
        leases = self._coordinator.state.leases
        self._held = {digest for digest in self._held if digest in leases}
        return self._held

    # Leases.

    def published(self) -> None:
        """Handle a published version: fetch it, and ask for work after a pause."""
        self.fetch()
        pause_s = self.member.strategy.pause_s()
        if pause_s is not None and self.present:
            self._later(pause_s, lambda: self._coordinator.ask(self.key))

    def _ask(self) -> None:
        if self.member.strategy.pause_s() is None:
            self._coordinator.ask(self.key)

    def granted(self, record: LeaseRecord) -> None:
        """Handle a granted lease."""
        self._held.add(record.digest)
        self._later(self._request_s, lambda: self._begin(record))

    def _begin(self, record: LeaseRecord) -> None:
        digest = record.digest
        answer = self.member.strategy.answer(record.lease, self._clock.now)
        if answer.what == "withhold":
            self._ask()
        elif answer.what == "rollouts" or answer.what == "wrong":
            self._queue.append((digest, record.lease, answer))
            self._work()
        else:
            self._at(answer.not_before, lambda: self._answer_at_once(digest, answer))

    def _answer_at_once(self, digest: str, answer: Answer) -> None:
        if answer.what == "refuse":
            self._coordinator.release(digest)
        else:
            self._coordinator.submit(digest, "rubbish")
        self._ask()

    # Engine and links.

    def fetch(self) -> None:
        """Start the next fetch: of the version that its lease names, else of the newest."""
        newest = self._coordinator.state.newest
        if self._fetching is not None or newest is None or not self.present:
            return
        version = self._queue[0][1].version if self._queue else newest.version
        if version in self._have:
            version = newest.version
        if version in self._have:
            return
        self._fetching = version
        joins = not self._have and version > 0
        seconds = self.member.first_fetch_s if joins else self.member.fetch_s
        self._later(seconds, lambda: self._fetched(version, seconds))

    def _fetched(self, version: int, seconds: float) -> None:
        now = self._clock.now
        fetch = Interval(BROADCAST, self.key, "fetch", version, now - seconds, now)
        self._coordinator.intervals.append(fetch)
        self._have.add(version)
        self._fetching = None
        self._work()
        self.fetch()

    def _work(self) -> None:
        """Sample the next lease, if its version is fetched."""
        if self._working or not self._queue:
            return
        digest, lease, answer = self._queue[0]
        if lease.version not in self._have:
            self.fetch()
            return
        self._working = True
        switch = self.member.load_s if self._loaded != lease.version else 0.0
        self._loaded = lease.version
        seconds = switch + self.member.sample_s(self._coordinator.lengths(digest))
        self._later(seconds, lambda: self._sampled(digest, lease, answer, seconds))

    def _sampled(self, digest: str, lease: Lease, answer: Answer, seconds: float) -> None:
        self._queue.popleft()
        self._working = False
        now = self._clock.now
        sample = Interval(self.member.pool, self.key, "sample", lease.step, now - seconds, now)
        self._coordinator.intervals.append(sample)
        self.sampled_groups += lease.groups
        content: Content = "wrong" if answer.what == "wrong" else "rollouts"
        ready = now + self._request_s
        self._at(max(ready, answer.not_before), lambda: self._coordinator.submit(digest, content))
        self._ask()
        self._work()

    # Time.

    def _drawn(self, mean: float) -> float:
        return self.member.rng.expovariate(1.0 / mean)

    def _later(self, seconds: float, action: Callable[[], None]) -> None:
        """Run an action after some seconds, unless the worker departs before; 0: at once."""
        if seconds > 0.0:
            self._at(self._clock.now + seconds, action)
        else:
            action()

    def _at(self, time: float, action: Callable[[], None]) -> None:
        life = self._life
        self._clock.at(time, lambda: action() if self._life == life else None)
