"""Simulates a run: the event loop of learner, publisher, workers and validators.

Each action may change the coordinator's state. Then leases expire, steps close, validators take
submissions, and waiting workers get leases, in the order of the real server.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import partial
from math import inf

from runspec.core.errors import UserError
from runspec.core.models import ModelConfig
from runspec.core.schema import RunSpec
from runspec.estimate.broadcast import version_size
from runspec.simulate import (
    BROADCAST,
    LEARNER,
    Coordinator,
    Interval,
    Model,
    run_model,
    unknown_speeds,
)
from runspec.simulate.population import Member, Swarm, ValidatorsBlock, members, planned_swarm
from runspec.simulate.result import Record, Result
from runspec.simulate.workers import Validators, Worker
from verify.coordinator.machine import events, filling, overdue
from verify.coordinator.machine.hopes import Hopes
from verify.coordinator.machine.state import Policy, State

_RETRIES = 60
"""Retries for waiting workers within one `lease_timeout`, when time alone may give them work."""
LONGEST_H = 1000.0
"""Most hours of a run without `budget.max_hours`."""


class Simulation:
    """A simulated run.

    Args:
        model: times of learner, publisher and links, and drawn lengths, as in `runspec plan`.
        policy: policy of the spec.
        members: the population.
        validators: their number, speed and failures.
        request_s: seconds of one request to the coordinator.
        backlog: `verify.backlog.submissions`.
        seed: seed of all random numbers.
        horizon_s: the run ends after this time.
    """

    def __init__(
        self,
        model: Model,
        policy: Policy,
        members: Sequence[Member],
        validators: ValidatorsBlock,
        *,
        request_s: float,
        backlog: int,
        seed: int,
        horizon_s: float,
    ) -> None:
        self._model, self._seed, self._horizon_s = model, seed, horizon_s
        self._request_s = request_s
        self._record = Record(policy.group_size)
        self._retry_at = inf
        self._to_train: deque[tuple[int, int]] = deque()
        self._training = False
        self._publisher_free = 0.0
        self._coordinator = Coordinator(policy, backlog, model, self._observe)
        self._clock = self._coordinator.clock
        self._workers = {
            member.key: Worker(member, self._coordinator, request_s) for member in members
        }
        self._validators = Validators(
            self._coordinator, validators, model.recompute_s, request_s, seed
        )

    def run(self) -> Result:
        """Run to the last trained step, to a stall, or to the horizon."""
        for worker in self._workers.values():
            worker.plan_presence()
        self._clock.at(0.0, partial(self._published, 0))
        ended = ""
        while not ended:
            due = filling.next_due(self._coordinator.state, self._clock.now) or inf
            due = min(due if due > self._clock.now else inf, self._retry_at)
            scheduled = self._clock.actions[0][0] if self._clock.actions else inf
            if min(due, scheduled) > self._horizon_s:
                ended, self._clock.now = "max_hours", self._horizon_s
            elif scheduled <= due:
                self._clock.run_next()
            else:
                self._clock.now, self._coordinator.touched = due, True
            if self._coordinator.touched and not ended:
                self._settle()
            if self._coordinator.stalled is not None:
                ended = "stalled"
            elif self._coordinator.state.finished and not (self._training or self._to_train):
                ended = "finished"
        for worker in self._workers.values():
            worker.end()
        return self._record.result(
            self._seed,
            ended,
            self._clock.now,
            self._coordinator,
            list(self._workers.values()),
            self._validators.count,
        )

    # Reactions to events.

    def _observe(self, before: State, event: events.Event) -> None:
        self._record.take(before, event)
        match event:
            case events.SubmissionReceived(lease=digest):
                self._validators.received(digest)
            case events.SubmissionJudged(lease=digest, accepted=accepted):
                worker = before.leases[digest].lease.worker
                self._workers[worker].member.strategy.judged(accepted)
            case events.StepClosed(step=step, trained=trained):
                self._to_train.append((step, len(trained)))
                self._clock.after(self._request_s, self._train)
            case _:
                pass

    def _settle(self) -> None:
        """Let coordinator, validators and waiting workers act until nothing changes."""
        self._retry_at = inf
        state = None
        while state is not self._coordinator.state and self._coordinator.stalled is None:
            state = self._coordinator.state
            self._coordinator.advance()
            self._validators.take_work()
            self._grant()
        self._coordinator.touched = False
        self._retry_at = min(self._retry_at, self._validators.next_change())
        self._record.waits(self._clock.now, self._coordinator.state)

    def _grant(self) -> None:
        """Lease work to waiting workers, in turn."""
        if not self._coordinator.waiting or self._coordinator.full:
            return
        now, state = self._clock.now, self._coordinator.state
        hopeful = filter(Hopes(state, now), self._coordinator.waiting)
        for key in sorted(hopeful, key=partial(filling.turn, state)):
            record = self._coordinator.lease(key, self._workers[key].holding())
            if record is not None:
                del self._coordinator.waiting[key]
                self._workers[key].granted(record)
        state = self._coordinator.state
        retry = now + max(1.0, state.policy.lease_timeout_s / _RETRIES)
        due = overdue.next_overdue(state, self._coordinator.waiting, now)
        self._retry_at = min(self._retry_at, retry, due or retry)

    # Learner and publisher.

    def _published(self, version: int) -> None:
        self._coordinator.publish(version)
        for worker in self._workers.values():
            worker.published()

    def _train(self) -> None:
        if self._training or not self._to_train:
            return
        self._training = True
        step, groups = self._to_train.popleft()
        seconds = self._model.train_s * groups / self._model.groups
        self._clock.after(seconds, partial(self._trained, step, self._clock.now))

    def _trained(self, step: int, began: float) -> None:
        self._training, now = False, self._clock.now
        self._record.trained_at[step] = now
        start = max(now, self._publisher_free)
        self._publisher_free = start + self._model.publish_s
        self._coordinator.intervals += [
            Interval(LEARNER, LEARNER, "train", step, began, now),
            Interval(BROADCAST, "publisher", "publish", step + 1, start, self._publisher_free),
        ]
        self._clock.at(self._publisher_free + self._request_s, partial(self._published, step + 1))
        self._train()


def simulate(
    spec: RunSpec, config: ModelConfig | None, swarm: Swarm | None = None, *, seed: int = 0
) -> Result:
    """Simulate a run to its end, to a stall, or for `budget.max_hours` or `LONGEST_H`.

    Args:
        spec: spec of the run.
        config: shape of the model; None if unknown.
        swarm: the population; None: the replicas of the spec, honest and always present.
        seed: seed of all random numbers; lengths and filtered groups follow the spec's seed.

    Raises:
        UserError: the run has no workers, a speed is unknown, or the population does not fit the
            spec.
    """
    if spec.supervised is not None:
        raise UserError(
            f"a run of kind {spec.algorithm.kind} has no workers to simulate",
            place="algorithm.kind",
            remedy="`runspec plan` estimates its time; simulate runs of kind grpo",
        )
    unknown = list(unknown_speeds(spec, config))
    if unknown or config is None:
        raise UserError(
            f"the time of a step is not known without {', '.join(unknown)}",
            place="simulate",
            remedy="say it in the spec; `runspec plan` shows what an estimate rests on",
        )
    swarm = swarm or planned_swarm(spec)
    size = version_size(spec, config)
    model = run_model(spec, config, size)
    validators = swarm.validators
    if validators.count is None:
        validators = validators.model_copy(update={"count": spec.verify.validators})
    simulation = Simulation(
        model,
        Policy.of(spec),
        members(swarm, spec, config, size, seed),
        validators,
        request_s=swarm.request or 0.0,
        backlog=spec.verify.backlog.submissions,
        seed=seed,
        horizon_s=3600.0 * (spec.budget.max_hours or LONGEST_H),
    )
    return simulation.run()
