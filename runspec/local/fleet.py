"""The supervisor's rules: what to start, stop and give up, and when. No process and no clock.

Invariants:
- A role is started only while the run is up or draining.
- A role that dies is started again after a pause that doubles with each death in a row; a step
  trained while the role runs ends the row. One death more than `rules.restarts` in a row ends the
  run. A role that may fail never ends the run: it is tried again after the longest pause, unless
  it said that it cannot go on.
- An onlooker, which only reads, may fail too. It is tried again ever more seldom, since nothing is
  lost meanwhile; only a long time without a death ends its row. A trained run does not wait for the
  next start of one that has died twice in a row.
- The run ends once: trained and published, by a role that cannot go on, by its budget, or on
  request. What began the stopping is the outcome.
- Roles that must read a changed spec are renewed one by one, and only while the run is up: the next
  is told to end once the one before runs again. That end is no death.
- It is done only when no process is alive: stopped by a signal, the servers last, so that no role
  waits for a server that is gone, and killed after a deadline.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum
from math import inf
from typing import Literal

from runspec.core.process import EXIT_FINAL

BACKOFF_FIRST_S = 0.5
BACKOFF_MAX_S = 10.0
ONLOOKER_PAUSE_S = 600.0
"""Longest pause of an onlooker, and how long it must have run for its death to be a first one."""
_LONGEST_ROW = 16
"""Deaths in a row after which the pause is the longest; its power must not overflow."""
DRAIN_S = 30.0
PUBLISH_S = 1800.0
STOP_S = 20.0


class State(StrEnum):
    WAITING = "waiting"
    STOPPED = "stopped"
    """Ended with the run, which can go on."""
    STARTING = "starting"
    RUNNING = "running"
    RENEWING = "renewing"
    """Ending, to start again at once with the changed spec."""
    BACKOFF = "backoff"
    FINISHED = "finished"
    FAILED = "failed"


class Phase(StrEnum):
    UP = "up"
    DRAINING = "draining"
    """Trained: the workers may end what they are at, and the last version is published."""
    STOPPING = "stopping"
    KILLING = "killing"


@dataclass(frozen=True)
class RestartPolicy:
    """What the end of a role means to its run."""

    ends_run: bool = False
    """Its exit 0 ends the run, once it is trained."""
    ends_when_sampled: bool = False
    """Its exit 0 is no death once every step has its rollouts."""
    may_fail: bool = False
    """The run can do without it for a time, however often it dies."""
    onlooker: bool = False
    """It only reads, and no other role needs it; it may fail."""
    late_s: float | None = None
    """How long a trained run waits for its exit 0, if it may fail; None: as for all others."""
    server: bool = False
    """Others talk to it."""


NEEDED = RestartPolicy()
"""Policy of a role that the run needs until it is told to end."""


@dataclass
class RoleState:
    """State of one role; times are seconds of one monotonic clock."""

    policy: RestartPolicy = NEEDED
    state: State = State.WAITING
    restarts: int = 0
    """Over this session."""
    deaths_in_a_row: int = 0
    """Since a step was last trained while this role ran; of an onlooker, since it ran for long."""
    started: float = 0.0
    """When it was last started."""
    retry_at: float = 0.0
    """While in backoff: when it is started again. While renewing: when it is killed."""

    @property
    def alive(self) -> bool:
        return self.state in (State.STARTING, State.RUNNING, State.RENEWING)


@dataclass(frozen=True)
class Rules:
    restarts: int
    """Deaths in a row of one role that are forgiven."""
    budget_ends_at: float | None = None
    """When the run's budget of time is used up."""
    drain_s: float = DRAIN_S
    """How long a trained run waits for its workers to end by themselves."""
    publish_s: float = PUBLISH_S
    """How long a trained run waits for its last version to be published."""
    stop_s: float = STOP_S
    """Time between SIGTERM and SIGKILL."""


@dataclass(frozen=True)
class Outcome:
    """Why the run ended."""

    kind: str
    """`finished`, `interrupted`, `paused`, `failed` (a role kept dying), `stopped` (a role said
    so), `over_budget`, or `unpublished` (trained, but the last version did not come out)."""
    role: str = ""
    exit_code: int = 0


@dataclass(frozen=True)
class Reached:
    """How far the run is."""

    stepped: bool = False
    """A step was trained since the last look."""
    sampled: bool = False
    """Every step has its rollouts."""
    trained: bool = False
    """Every step is trained."""
    published: bool = False
    """The last policy version is out."""


@dataclass(frozen=True)
class Changed:
    """The run's spec has changed."""

    restarts: int
    budget_ends_at: float | None
    """Both as in `Rules`."""
    renew: tuple[str, ...] = ()
    """Roles that must read the spec anew, in this order; names that are not known run elsewhere."""


@dataclass(frozen=True)
class Action:
    """Something to do with the process of a role."""

    do: Literal["start", "stop", "kill"]
    """`stop` is SIGTERM, `kill` is SIGKILL."""
    role: str


@dataclass
class Fleet:
    """All roles of a run, and how far the run itself is.

    Each method takes what has happened, and returns what to do about it, in order; nothing where it
    returns nothing. `now` is in seconds of one monotonic clock, that of all times here.
    """

    roles: dict[str, RoleState]
    rules: Rules
    phase: Phase = Phase.UP
    since: float = 0.0
    """When the phase began."""
    servers_stopped: bool = False
    sampled: bool = False
    trained: bool = False
    published: bool = False
    renewing: str | None = None
    """The role whose turn it is to be started again with a changed spec; until it runs again."""
    to_renew: list[str] = field(default_factory=list)
    """Those after it, in the order of their turns."""
    outcome: Outcome | None = None

    @property
    def ending(self) -> bool:
        """Whether the roles are told to end; `outcome` says why."""
        return self.phase in (Phase.STOPPING, Phase.KILLING)

    @property
    def alive(self) -> list[str]:
        """The roles with a process."""
        return [name for name, role in self.roles.items() if role.alive]

    @property
    def done(self) -> bool:
        """Whether the run has ended and no process is left."""
        return self.ending and not self.alive

    def ready(self, role: str, now: float) -> list[Action]:
        """A role has shown a first sign of life: its port answers, or it has logged something."""
        if self.roles[role].state is State.STARTING:
            self.roles[role].state = State.RUNNING
        return []

    def reached(self, reached: Reached) -> None:
        """The run was looked at."""
        self.sampled |= reached.sampled
        self.trained |= reached.trained
        self.published |= reached.published
        if reached.stepped:
            for role in self.roles.values():
                if role.state is State.RUNNING and not role.policy.onlooker:
                    role.deaths_in_a_row = 0

    def changed(self, changed: Changed) -> None:
        """The run has taken another spec."""
        self.rules = replace(
            self.rules, restarts=changed.restarts, budget_ends_at=changed.budget_ends_at
        )
        if self.phase is Phase.UP:
            known = [role for role in changed.renew if role in self.roles]
            self.to_renew = list(dict.fromkeys([*self.to_renew, *known]))

    def interrupted(self, now: float) -> list[Action]:
        """Ctrl-C or SIGTERM; the second one kills."""
        return self._kill() if self.ending else self._stop(Outcome("interrupted"), now)

    def paused(self, now: float) -> list[Action]:
        """Someone wants the run to rest: it stops as for Ctrl-C."""
        return [] if self.ending else self._stop(Outcome("paused"), now)

    def exited(self, name: str, code: int, now: float) -> list[Action]:
        """A role has ended, by an exit code or, negative, by a signal."""
        role, policy = self.roles[name], self.roles[name].policy
        if self.ending:
            role.state = self._at_rest()
            return []
        if code == 0 and policy.ends_run and self.trained:
            role.state = State.FINISHED
            self._begin(Phase.DRAINING, now)
            return []
        draining = self.phase is Phase.DRAINING
        done = draining or self.sampled or self.trained
        late = code == 0 and policy.late_s is not None and done
        sampled = policy.ends_when_sampled and (draining or (code == 0 and self.sampled))
        if late or sampled:
            role.state = State.FINISHED
            return []
        # Any other exit 0 is a death too: someone sent it SIGTERM, and the run needs it.
        needed, onlooker = not policy.may_fail, policy.onlooker
        if code == EXIT_FINAL:
            role.state = State.FAILED
            return self._stop(Outcome("stopped", name, code), now) if needed else []
        if role.state is State.RENEWING:
            role.state = State.WAITING
            return []
        if onlooker and now - role.started >= ONLOOKER_PAUSE_S:
            role.deaths_in_a_row = 0
        role.deaths_in_a_row += 1
        if needed and role.deaths_in_a_row > self.rules.restarts:
            role.state = State.FAILED
            return self._stop(Outcome("failed", name, code), now)
        role.state = State.BACKOFF
        pause = BACKOFF_FIRST_S * 2 ** min(role.deaths_in_a_row - 1, _LONGEST_ROW)
        role.retry_at = now + min(ONLOOKER_PAUSE_S if onlooker else BACKOFF_MAX_S, pause)
        return []

    def tick(self, now: float) -> list[Action]:
        """Time has passed."""
        waited, rules = now - self.since, self.rules
        match self.phase:
            case Phase.STOPPING:
                if waited >= rules.stop_s:
                    return self._kill()
                if self.servers_stopped or self._others_alive():
                    return []
                self.servers_stopped = True
                return [Action("stop", name) for name in self.alive]
            case Phase.KILLING:
                return []
            case Phase.DRAINING:
                workers_left = any(self.roles[name].policy.ends_when_sampled for name in self.alive)
                drained = not workers_left or waited >= rules.drain_s
                late = any(self._is_late(name, waited) for name in self.roles)
                if self.published and drained and not late:
                    return self._stop(Outcome("finished"), now)
                if not self.published and waited >= rules.publish_s:
                    return self._stop(Outcome("unpublished"), now)
                return self._start_due(now)
            case Phase.UP:
                if rules.budget_ends_at is not None and now >= rules.budget_ends_at:
                    return self._stop(Outcome("over_budget"), now)
                return self._renew(now) + self._start_due(now)

    def _is_late(self, name: str, waited: float) -> bool:
        """Whether a role that a trained run waits for runs, or will again soon."""
        role, late_s = self.roles[name], self.roles[name].policy.late_s
        resting = self.keeps_dying(name) and role.state is State.BACKOFF
        ended = resting or role.state in (State.FINISHED, State.FAILED)
        return late_s is not None and waited < late_s and not ended

    def keeps_dying(self, name: str) -> bool:
        """Whether a role is an onlooker that has died more than once in a row."""
        return self.roles[name].policy.onlooker and self.roles[name].deaths_in_a_row > 1

    def _others_alive(self) -> list[str]:
        """Return the roles with a process that are no servers."""
        return [name for name in self.alive if not self.roles[name].policy.server]

    def _start_due(self, now: float) -> list[Action]:
        actions = []
        for name, role in self.roles.items():
            due = role.state is State.BACKOFF and now >= role.retry_at
            if due or role.state is State.WAITING:
                role.state, role.started = State.STARTING, now
                role.restarts += due
                actions.append(Action("start", name))
        return actions

    def _renew(self, now: float) -> list[Action]:
        """Gives the next role its turn once the one before runs again."""
        if self.renewing is not None:
            role = self.roles[self.renewing]
            if role.state is State.RENEWING and now >= role.retry_at:
                role.retry_at = inf
                return [Action("kill", self.renewing)]
            if role.state not in (State.RUNNING, State.FINISHED):
                return []
        self.renewing = self.to_renew.pop(0) if self.to_renew else None
        if self.renewing is None or not self.roles[self.renewing].alive:
            return []  # whenever a role starts, it reads what is there by then
        role = self.roles[self.renewing]
        role.state, role.retry_at = State.RENEWING, now + self.rules.stop_s
        return [Action("stop", self.renewing)]

    def _begin(self, phase: Phase, now: float) -> None:
        self.phase, self.since = phase, now
        self.renewing, self.to_renew = None, []

    def _stop(self, outcome: Outcome, now: float) -> list[Action]:
        self._begin(Phase.STOPPING, now)
        self.outcome = outcome
        for role in self.roles.values():
            if role.state is State.BACKOFF:
                role.state = self._at_rest()
        return [Action("stop", name) for name in self._others_alive()]

    def _kill(self) -> list[Action]:
        self.phase = Phase.KILLING
        return [Action("kill", name) for name in self.alive]

    def _at_rest(self) -> State:
        """Return the state of a role that ended with the run."""
        finished = self.outcome is not None and self.outcome.kind == "finished"
        return State.FINISHED if finished else State.STOPPED
