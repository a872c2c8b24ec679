"""Model of a simulated run: times of its roles, drawn lengths, the virtual clock, the coordinator.

The coordinator uses the pure decisions of `verify.coordinator` and records them as the real one's
handlers do, without signatures, files and HTTP.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain
from math import exp, log, sqrt
from random import Random
from typing import Literal

from runspec.core.models import ModelConfig
from runspec.core.schema import RunSpec
from runspec.estimate import assumed
from runspec.estimate.broadcast import VersionSize
from runspec.estimate.speed import check_tokens_per_s, decode_speed, island_seconds, learner_seconds
from verify.coordinator.machine import events, filling
from verify.coordinator.machine.consequences import recorded
from verify.coordinator.machine.leases import LeaseRecord
from verify.coordinator.machine.stalls import Stalled
from verify.coordinator.machine.state import Policy, State
from verify.formats.lease import Lease

Lengths = tuple[float, ...]
"""Output tokens of each rollout of a lease."""

Content = Literal["rollouts", "wrong", "rubbish"]
"""Content of a submission: `wrong` looks like rollouts and fails recomputation; `rubbish` cannot be
parsed."""

LEARNER, BROADCAST, VALIDATORS = "learner", "broadcast", "validators"


@dataclass(frozen=True)
class Model:
    """Times and sizes of a run."""

    groups: int
    """Groups that a step trains."""
    train_s: float
    """Seconds of the learner for a full step."""
    publish_s: float
    recompute_s: Callable[[Lengths], float]
    """Seconds of a validator to recompute the submission of a lease."""
    lengths: Callable[[int, int], Sequence[float]]
    """Output tokens of each rollout, by step and number of the group within the step."""
    filtered: Callable[[int, int], bool]
    """Whether the filter drops a group, by step and number of the group within the step."""


@dataclass(frozen=True)
class Interval:
    """Interval in which one process does one task."""

    role: str
    """`learner`, `broadcast` (publisher and links), a pool, or `validators`."""
    member: str
    """Name of the process, or of that whose link it is."""
    what: Literal["train", "publish", "fetch", "sample", "check"]
    """`sample` begins with loading the version, if the engine has another."""
    step: int
    """The step; for `publish` and `fetch` the version."""
    start: float
    end: float


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


def run_model(spec: RunSpec, config: ModelConfig | None, size: VersionSize) -> Model:
    """Return the model of a run.

    Args:
        spec: a spec whose speeds are all known.
        config: shape of the model.
        size: sizes of a version.
    """
    train_s = learner_seconds(spec, config)
    check = check_tokens_per_s(spec, config)
    assert train_s is not None, "asked for the model of an unknown speed"
    prompt = assumed.mean_prompt_tokens(spec).value

    def recompute_s(lengths: Lengths) -> float:
        assert check is not None, "asked for the model of an unknown speed"
        return (len(lengths) * prompt + sum(lengths)) / check.value

    lengths, filtered = draws(
        seed=spec.seed,
        group_size=spec.grpo.group_size,
        mean=assumed.mean_new_tokens(spec).value,
        spread=assumed.LENGTH_SPREAD,
        longest=max(pool.max_new_tokens for pool in spec.samplers),
        filtered_share=assumed.filtered_share(spec).value,
    )
    return Model(
        groups=spec.grpo.prompts_per_step,
        train_s=train_s,
        publish_s=publish_seconds(spec, size),
        recompute_s=recompute_s,
        lengths=lengths,
        filtered=filtered,
    )


def publish_seconds(spec: RunSpec, size: VersionSize) -> float:
    """Return the seconds in which the publisher makes one version."""
    deltas = size.whole / assumed.DIFF_BYTES_S if spec.broadcast.format == "delta" else 0.0
    return size.whole / assumed.PUBLISH_BYTES_S + deltas


def draws(
    *,
    seed: int,
    group_size: int,
    mean: float,
    spread: float,
    longest: float,
    filtered_share: float,
) -> tuple[Callable[[int, int], Sequence[float]], Callable[[int, int], bool]]:
    """Return lengths and filter verdicts of groups, as functions of step and group.

    Lengths are log-normal with the mean and, over it, the standard deviation `spread`, cut at
    `longest`; what is cut off is missing from the mean.
    """
    sigma = sqrt(log(1.0 + spread * spread))
    mu = log(mean) - sigma * sigma / 2

    @cache
    def lengths(step: int, group: int) -> tuple[float, ...]:
        random = Random(f"{seed}/{step}/{group}/lengths")
        drawn = (exp(random.gauss(mu, sigma)) for _ in range(group_size))
        return tuple(min(max(1.0, length), longest) for length in drawn)

    @cache
    def filtered(step: int, group: int) -> bool:
        if filtered_share == 0.0:  # the usual case, without a draw for each group
            return False
        return Random(f"{seed}/{step}/{group}/filter").random() < filtered_share

    return lengths, filtered


def unknown_speeds(spec: RunSpec, config: ModelConfig | None) -> Iterator[str]:
    """Yield the fields of the spec without which a run cannot be simulated."""
    if config is None:
        yield "model.hf"
        return
    if learner_seconds(spec, config) is None:
        speeds = island_seconds(spec, config)
        first = next(iter(speeds), "")
        for name in [name for name, seconds in speeds.items() if seconds is None] or [first]:
            member = "" if name == first else f"islands.members.{name}."
            yield f"learner.{member}hardware.peak_flops"
    for pool in spec.samplers:
        if decode_speed(pool, spec, config) is None:
            yield f"samplers.{pool.name}.tokens_per_s"
    if spec.verify.validators and check_tokens_per_s(spec, config) is None:
        yield "verify.tokens_per_s"


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
