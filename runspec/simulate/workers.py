"""Workers and validators of a simulated run.

A worker has its presence, engine and leases; validators have a queue, checks and failures.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from random import Random

from runspec.simulate import BROADCAST, VALIDATORS, Content, Coordinator, Interval, Lengths
from runspec.simulate.population import Absence, Answer, Member, ValidatorsBlock
from verify.coordinator.machine.events import GroupGrade, SubmissionJudged, SubmissionSetAside
from verify.coordinator.machine.leases import LeaseRecord
from verify.coordinator.machine.trust import Claims
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
            for record in self._coordinator.state.leases.unsettled.get(self.key, ()):
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


UNRECOMPUTED_S_TOKEN = 15e-6
"""Seconds an output token of a submission that is not recomputed: parsing, grading, checks and
verdict rows of the laptop profile (docs/performance.md, "The validator")."""
REFUSED_S = 0.02
"""Seconds of a submission that cannot be parsed: its transfer and verdict (docs/performance.md)."""
_REASONS = {
    "rubbish": "format: no safetensors file",
    "wrong": "logprobs_submission: 0.5 > 0.01",
}


@dataclass
class _Validator:
    name: str
    rng: Random
    """Random numbers for its failures, and for which submissions it recomputes."""
    submission: str | None = None
    works: bool = True
    life: int = 0


class Validators:
    """Judges submissions in the order and by the claims of `verify.coordinator`.

    Args:
        coordinator: the coordinator of the run.
        checks: their number, speed and failures.
        recompute_s: seconds of the whole check of a lease's submission, at speed 1.
        request_s: seconds of one request to the coordinator.
        seed: seed of all random numbers.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        checks: ValidatorsBlock,
        recompute_s: Callable[[Lengths], float],
        request_s: float,
        seed: int,
    ) -> None:
        self._coordinator, self._clock = coordinator, coordinator.clock
        self._checks, self._claims = checks, Claims()
        self._recompute_s, self._request_s = recompute_s, request_s
        self.count = checks.count or 0
        names = [f"validator-{number}" for number in range(self.count)]
        self._all = [_Validator(name, Random(f"{seed}/{name}")) for name in names]
        for validator in self._all:
            self._plan_failure(validator)

    def next_change(self) -> float:
        """Return the time at which time alone may give a validator work; infinite: never."""
        due = self._claims.next_change(self._clock.now)
        return inf if due is None else due

    def received(self, digest: str) -> None:
        """Accept a submission at once if there are no validators."""
        if not self._all:
            self._judge(self._coordinator.state.leases[digest], "nobody", recomputed=False)

    def take_work(self) -> None:
        """Assign submissions to free validators."""
        now, state = self._clock.now, self._coordinator.state
        waiting = {r.submission: r for r in state.to_judge if r.submission is not None}
        if not waiting:
            return
        for validator in self._all:
            if validator.submission is not None:
                self._claims.prolong(validator.name, now)
        for validator in self._all:
            if validator.works and validator.submission is None:
                judged = state.newest_accepted
                chosen = self._claims.claim(validator.name, waiting, now, judged=judged)
                if chosen is not None:
                    record = waiting.get(chosen) or state.leases.of_submission(chosen)
                    assert record is not None
                    self._begin(validator, record)
                elif not self._claims.suspects:
                    return

    def _begin(self, validator: _Validator, record: LeaseRecord) -> None:
        share = self._coordinator.state.share_of(record.lease.worker)
        recomputed = validator.rng.random() < (1.0 if record.status == "accepted" else share)
        seconds = self._seconds(record, recomputed)
        validator.submission, life = record.submission, validator.life

        def end() -> None:
            if validator.life == life:
                start, step = self._clock.now - seconds, record.lease.step
                check = Interval(VALIDATORS, validator.name, "check", step, start, start + seconds)
                self._coordinator.intervals.append(check)
                self._end(validator, record, recomputed)

        self._clock.after(seconds + 2 * self._request_s, end)

    def _seconds(self, record: LeaseRecord, recomputed: bool) -> float:
        content = self._coordinator.contents[record.digest]
        if content == "rubbish":
            return REFUSED_S
        lengths = self._coordinator.lengths(record.digest)
        seconds = self._recompute_s(lengths)
        if not recomputed:
            seconds = min(seconds, UNRECOMPUTED_S_TOKEN * sum(lengths))
        return seconds / self._checks.speed

    def _end(self, validator: _Validator, record: LeaseRecord, recomputed: bool) -> None:
        validator.submission = None
        assert record.submission is not None
        current = self._coordinator.state.leases.get(record.digest)
        if current is not None and current.status == "submitted":
            self._judge(current, validator.name, recomputed=recomputed)
        self._claims.settle(validator.name, record.submission)
        waiting = {r.submission: r for r in self._coordinator.state.to_judge}
        for submission, attempts in self._claims.hopeless().items():
            if hopeless := waiting.get(submission):
                self._coordinator.record(
                    SubmissionSetAside(self._clock.now, hopeless.digest, submission, attempts)
                )
            self._claims.forget(submission)

    def _judge(self, record: LeaseRecord, validator: str, *, recomputed: bool) -> None:
        content = self._coordinator.contents[record.digest]
        accepted = content == "rollouts" or (content == "wrong" and not recomputed)
        size = self._coordinator.state.policy.group_size
        lengths, grades = self._coordinator.lengths(record.digest), []
        for group in range(record.lease.groups if accepted else 0):
            filtered = self._coordinator.filtered(record.digest, group)
            tokens = int(sum(lengths[group * size : (group + 1) * size]))
            grades.append(
                GroupGrade(
                    group=group,
                    outcome="filtered" if filtered else "usable",
                    rollouts=size,
                    tokens=tokens,
                    target=None,
                    task_reward=0.0 if filtered else 0.5,
                    reward=0.5,
                    length_error=None,
                    logprob_diff=0.0 if recomputed else None,
                )
            )
        assert record.submission is not None
        self._coordinator.record(
            SubmissionJudged(
                at=self._clock.now,
                lease=record.digest,
                submission=record.submission,
                verdict=f"verdict on {record.submission}",
                validator=validator,
                accepted=accepted,
                reason="" if accepted else _REASONS[content],
                groups=tuple(grades),
            )
        )

    def _plan_failure(self, validator: _Validator) -> None:
        """Schedule the failure of a validator's process; its claim then counts as failed once."""
        if self._checks.fails is None:
            return

        def fail() -> None:
            validator.life, validator.works = validator.life + 1, False
            validator.submission = None
            self._clock.after(self._checks.restarts, restart)

        def restart() -> None:
            validator.works = True
            self._claims.keep(validator.name, (), self._clock.now)
            self._plan_failure(validator)
            self._coordinator.touched = True

        self._clock.after(validator.rng.expovariate(1.0 / self._checks.fails), fail)
