"""Discrete-event model of a run: learner, broadcast, sampler replicas, validators.

It follows the rules of the coordinator and of the roles (docs/coordinator.md), lease by lease:

- A lease names the newest published version v. Step s is leased while s - v <= `async_level`, the
  lowest step that needs groups first, never more groups than it still needs; groups that a filter
  drops are leased again, up to `max_groups` times the need.
- A replica fetches versions while it samples, one at a time. It switches when a lease names one
  that it has not loaded, and waits for that if it is still under way.
- Submissions are checked by the validators first come, first served.
- Steps close in order. The learner trains one at a time; version s + 1 is published after step s.

It leaves out workers that fail or come and go, rejected work, deadlines and restarts. It is
deterministic: lengths and filtered groups are functions of step and group.
"""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, count
from typing import Literal

Lengths = tuple[float, ...]
"""Output tokens of each rollout of a lease."""

LEARNER, PUBLISHER, BROADCAST, VALIDATORS = "learner", "publisher", "broadcast", "validators"


@dataclass(frozen=True)
class Replica:
    """One sampler replica."""

    pool: str
    fetch_s: float
    """Seconds until it has a version, from publication or from when its link is free."""
    load_s: float
    """Seconds to switch its engine to a fetched version."""
    lease_groups: int
    sample_s: Callable[[Lengths], float]
    """Seconds to sample a lease."""


@dataclass(frozen=True)
class Model:
    """Times and sizes of a run."""

    steps: int
    groups: int
    """Groups that a step trains."""
    async_level: int
    train_s: float
    """Seconds of the learner for a full step."""
    publish_s: float
    replicas: tuple[Replica, ...]
    validators: int
    """Number of validators; 0: every submission is accepted."""
    check_s: Callable[[Lengths], float]
    """Seconds to check the submission of a lease."""
    lengths: Callable[[int, int], Sequence[float]]
    """Output tokens of each rollout, by step and number of the group within the step."""
    filtered: Callable[[int, int], bool]
    """Whether the filter drops a group, by step and number of the group within the step."""
    max_groups: float = 4.0
    """Leased groups are at most this many times the needed ones; then the step closes."""


@dataclass(frozen=True)
class Interval:
    """Interval in which one process does one task."""

    role: str
    """`learner`, `publisher`, `broadcast` (the links), a pool, or `validators`."""
    member: int
    """Number of the replica, of the link's replica, or of the validator."""
    what: Literal["train", "publish", "fetch", "load", "sample", "check"]
    step: int
    """The step; for `publish`, `fetch` and `load` the version."""
    start: float
    end: float


@dataclass
class Step:
    """One simulated step; times count from the publication of version 0."""

    number: int
    opened: float | None = None
    """Time of its first lease."""
    first_rollouts: float | None = None
    """Time at which its first submission was checked."""
    full: float | None = None
    """Time at which its batch was signed."""
    train_start: float = 0.0
    trained: float = 0.0
    leased: int = 0
    """Leased groups; the next three count groups too."""
    checked: int = 0
    filtered: int = 0
    kept: int = 0
    tokens: float = 0.0
    """Checked output tokens."""
    lag: int = 0
    """Largest lag of the rollouts that it trains on."""

    @property
    def outstanding(self) -> int:
        return self.leased - self.checked


@dataclass(frozen=True)
class Simulated:
    """Simulated run, from its first step to its last."""

    steps: tuple[Step, ...]
    intervals: tuple[Interval, ...]


@dataclass
class _Worker:
    replica: Replica
    number: int
    """Among all."""
    member: int
    """Of its pool."""
    have: set[int] = field(default_factory=set)
    loaded: int | None = None
    fetching: int | None = None
    lease: _Lease | None = None


@dataclass(frozen=True)
class _Lease:
    step: int
    version: int
    first: int
    groups: int

    @property
    def numbers(self) -> range:
        """Of its groups within the step."""
        return range(self.first, self.first + self.groups)


class Clock:
    """Virtual time in seconds since version 0 was published, and the scheduled actions.

    Actions run in order of time; actions of equal times run in the order of scheduling.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.actions: list[tuple[float, int, Callable[[], None]]] = []
        """Heap of the scheduled actions, with their times."""
        self._count = 0

    def at(self, time: float, action: Callable[[], None]) -> None:
        """Schedule an action at a time."""
        heapq.heappush(self.actions, (max(time, self.now), self._count, action))
        self._count += 1

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        """Schedule an action some seconds from now."""
        self.at(self.now + seconds, action)

    def run_next(self) -> None:
        """Advance to the next action and run it."""
        self.now, _, action = heapq.heappop(self.actions)
        action()


def simulate(model: Model) -> Simulated:
    """Runs the model.

    Raises:
        ValueError: a run that would never end: no replicas, no groups.
    """
    if not model.replicas or min(model.steps, model.groups) < 1:
        raise ValueError("no replicas, steps or groups: such a run never ends")
    return _Simulation(model).run()


class _Simulation:
    """Events in order of time, of equal times in order of cause."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._clock = Clock()
        self._most = int(model.max_groups * model.groups)
        """Groups that a step may lease."""
        self._steps = [Step(number) for number in range(model.steps)]
        self._newest = -1
        self._trained = 0
        self._learner_busy = False
        self._publisher_free = 0.0
        members: dict[str, Iterator[int]] = defaultdict(count)
        self._workers = [
            _Worker(replica, number, next(members[replica.pool]))
            for number, replica in enumerate(model.replicas)
        ]
        self._waiting = deque(self._workers)
        self._validators = [0.0] * model.validators
        self._intervals: list[Interval] = []

    def run(self) -> Simulated:
        self._clock.at(0.0, self._publish)
        while self._clock.actions and self._trained < self._model.steps:
            self._clock.run_next()
        return Simulated(tuple(self._steps), tuple(self._intervals))

    def _begin(self, task: Interval, then: Callable[[], None]) -> None:
        """Records a task and schedules what follows its end."""
        self._intervals.append(task)
        self._clock.at(task.end, then)

    # Publisher and links.

    def _publish(self) -> None:
        self._newest += 1
        for worker in self._workers:
            self._fetch(worker)
        self._grant()

    def _fetch(self, worker: _Worker) -> None:
        """Starts the next fetch: of the version that its lease names, else of the newest."""
        if worker.fetching is not None:
            return
        version = worker.lease.version if worker.lease else self._newest
        if version in worker.have:
            version = self._newest
        if version in worker.have:
            return
        worker.fetching = version
        now = self._clock.now
        end = now + worker.replica.fetch_s
        fetch = Interval(BROADCAST, worker.number, "fetch", version, now, end)
        self._begin(fetch, lambda: self._fetched(worker))

    def _fetched(self, worker: _Worker) -> None:
        assert worker.fetching is not None
        worker.have.add(worker.fetching)
        arrived, worker.fetching = worker.fetching, None
        self._fetch(worker)
        if worker.lease is not None and worker.lease.version == arrived:
            self._sample(worker, worker.lease)

    # Leases and samplers.

    def _grant(self) -> None:
        """Leases to those who wait, in the order in which they asked, as far as there is work."""
        while self._waiting and self._lease(self._waiting[0]):
            self._waiting.popleft()

    def _lease(self, worker: _Worker) -> bool:
        """Gives a worker its next lease; False where there is none to give."""
        wanted = self._wanting()
        if wanted is None:
            return False
        step, groups = wanted
        groups = min(groups, worker.replica.lease_groups)
        if step.opened is None:
            step.opened = self._clock.now
        lease = _Lease(step.number, self._newest, step.leased, groups)
        step.leased += groups
        step.lag = max(step.lag, step.number - self._newest)
        worker.lease = lease
        if lease.version in worker.have:
            self._sample(worker, lease)
        else:
            self._fetch(worker)
        return True

    def _wanting(self) -> tuple[Step, int] | None:
        """The lowest step that may be leased and needs groups, and how many."""
        last = min(self._model.steps, self._newest + self._model.async_level + 1)
        for step in self._steps[self._trained : last]:
            if step.full is not None:
                continue
            needed = self._model.groups - step.kept - step.outstanding
            needed = min(needed, self._most - step.leased)
            if needed > 0:
                return step, needed
        return None

    def _sample(self, worker: _Worker, lease: _Lease) -> None:
        pool, now = worker.replica.pool, self._clock.now
        start = now
        if worker.loaded != lease.version:
            start += worker.replica.load_s
            worker.loaded = lease.version
            self._intervals.append(Interval(pool, worker.member, "load", lease.version, now, start))
        groups = (self._model.lengths(lease.step, group) for group in lease.numbers)
        lengths = tuple(chain.from_iterable(groups))
        end = start + worker.replica.sample_s(lengths)
        sample = Interval(pool, worker.member, "sample", lease.step, start, end)
        self._begin(sample, lambda: self._sampled(worker, lease, lengths))

    def _sampled(self, worker: _Worker, lease: _Lease, lengths: Lengths) -> None:
        worker.lease = None
        self._waiting.append(worker)
        if not self._validators:
            self._checked(lease, lengths)
            return
        member = min(range(len(self._validators)), key=self._validators.__getitem__)
        start = max(self._clock.now, self._validators[member])
        end = start + self._model.check_s(lengths)
        self._validators[member] = end
        check = Interval(VALIDATORS, member, "check", lease.step, start, end)
        self._begin(check, lambda: self._checked(lease, lengths))
        self._grant()

    # Validators' verdicts and the learner.

    def _checked(self, lease: _Lease, lengths: Lengths) -> None:
        step = self._steps[lease.step]
        if step.first_rollouts is None:
            step.first_rollouts = self._clock.now
        step.filtered += sum(self._model.filtered(lease.step, group) for group in lease.numbers)
        step.checked += lease.groups
        step.kept = step.checked - step.filtered
        step.tokens += sum(lengths)
        self._close()
        self._grant()

    def _close(self) -> None:
        for step in self._steps[self._trained :]:
            if step.full is None:
                spent = step.leased >= self._most and not step.outstanding
                if step.kept < self._model.groups and not spent:
                    break
                step.full = self._clock.now
        self._train()

    def _train(self) -> None:
        if self._learner_busy or self._trained == self._model.steps:
            return
        step = self._steps[self._trained]
        if step.full is None:
            return
        self._learner_busy = True
        step.train_start = now = self._clock.now
        step.trained = now + self._model.train_s * step.kept / self._model.groups
        train = Interval(LEARNER, 0, "train", step.number, now, step.trained)
        self._begin(train, self._end_of_step)

    def _end_of_step(self) -> None:
        self._trained += 1
        self._learner_busy = False
        start = max(self._clock.now, self._publisher_free)
        self._publisher_free = start + self._model.publish_s
        publish = Interval(PUBLISHER, 0, "publish", self._trained, start, self._publisher_free)
        self._begin(publish, self._publish)
        self._train()
