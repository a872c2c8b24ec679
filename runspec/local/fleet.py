"""The supervisor's rules as a pure state machine: what to start, stop and give up, and when.

Invariants:
- A role is started only by `Start`, and only while the run is up or draining.
- A role that dies is started again after a pause that doubles with each death in a row; a step
  trained while the role runs ends the row. One death more than `rules.restarts` in a row ends the
  run.
- The run ends once: trained and published, by a role that cannot go on, by its budget, or on
  request. What began the stopping is the outcome.
- Roles that must read a changed spec are renewed one by one, and only while the run is up: the next
  is told to end once the one before runs again. That end is no death.
- It is done only when no process is alive: stopped politely, the servers last, so that nobody waits
  for one that is gone, and killed after a deadline.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from math import inf

from runspec.core.process import EXIT_FINAL

BACKOFF_FIRST_S = 0.5
BACKOFF_MAX_S = 10.0
DRAIN_S = 30.0
PUBLISH_S = 1800.0
STOP_S = 20.0


class State(StrEnum):
    WAITING = "waiting"
    STARTING = "starting"
    RUNNING = "running"
    RENEWING = "renewing"
    """Told to end, to be started at once with what has changed."""
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
class RoleState:
    """What is known of one role; times are seconds of one monotonic clock."""

    state: State = State.WAITING
    restarts: int = 0
    """Over this session."""
    deaths_in_a_row: int = 0
    """Since a step was last trained while this role ran."""
    retry_at: float = 0.0
    """While in backoff: when it is started again. While renewing: when it is killed."""

    @property
    def alive(self) -> bool:
        return self.state in (State.STARTING, State.RUNNING, State.RENEWING)


@dataclass(frozen=True)
class Rules:
    restarts: int
    """Deaths in a row of one role that are forgiven."""
    ends_run: frozenset[str] = frozenset()
    """Roles whose exit 0 ends the run, once it is trained."""
    ends_when_sampled: frozenset[str] = frozenset()
    """Roles whose exit 0 is no death once every step has its rollouts."""
    servers: frozenset[str] = frozenset()
    """Roles that others talk to."""
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
class Fleet:
    """All roles of a run, and how far the run itself is."""

    roles: Mapping[str, RoleState]
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
    to_renew: tuple[str, ...] = ()
    """Those after it, in the order of their turns."""
    outcome: Outcome | None = None

    @property
    def done(self) -> bool:
        ending = self.phase in (Phase.STOPPING, Phase.KILLING)
        return ending and not any(role.alive for role in self.roles.values())


@dataclass(frozen=True)
class Tick:
    """Time has passed."""


@dataclass(frozen=True)
class Ready:
    """A role has shown a first sign of life: its port answers, or it has logged something."""

    role: str


@dataclass(frozen=True)
class Exited:
    role: str
    code: int
    """Exit code; negative: the signal that ended it."""


@dataclass(frozen=True)
class Progress:
    """A step was trained."""


@dataclass(frozen=True)
class Sampled:
    """Every step of the run has its rollouts."""


@dataclass(frozen=True)
class Trained:
    """Every step of the run is trained."""


@dataclass(frozen=True)
class Published:
    """The last policy version is out."""


@dataclass(frozen=True)
class StopRequested:
    """Ctrl-C or SIGTERM; the second one kills."""


@dataclass(frozen=True)
class PauseRequested:
    """Stop as for Ctrl-C, but because someone wants the run to rest."""


@dataclass(frozen=True)
class Changed:
    """The run's spec has changed."""

    restarts: int
    budget_ends_at: float | None
    """Both as in `Rules`."""
    renew: tuple[str, ...] = ()
    """Roles that must read the spec anew, in this order; names that are not known run elsewhere."""


Event = (
    Tick
    | Ready
    | Exited
    | Progress
    | Sampled
    | Trained
    | Published
    | StopRequested
    | PauseRequested
    | Changed
)


@dataclass(frozen=True)
class Start:
    role: str


@dataclass(frozen=True)
class Stop:
    """SIGTERM."""

    role: str


@dataclass(frozen=True)
class Kill:
    """SIGKILL."""

    role: str


Action = Start | Stop | Kill


def advance(fleet: Fleet, event: Event, now: float) -> tuple[Fleet, list[Action]]:
    """The one transition function.

    Args:
        fleet: the state before.
        event: what happened.
        now: seconds of the monotonic clock that the fleet's times are of.

    Returns:
        The state after, and what to do about it, in order.
    """
    match event:
        case Tick():
            return _tick(fleet, now)
        case Ready(role):
            if fleet.roles[role].state is State.STARTING:
                fleet = _with(fleet, role, state=State.RUNNING)
        case Progress():
            for name, known in fleet.roles.items():
                if known.state is State.RUNNING:
                    fleet = _with(fleet, name, deaths_in_a_row=0)
        case Sampled():
            fleet = replace(fleet, sampled=True)
        case Trained():
            fleet = replace(fleet, trained=True)
        case Published():
            fleet = replace(fleet, published=True)
        case Changed(restarts, budget_ends_at, renew):
            rules = replace(fleet.rules, restarts=restarts, budget_ends_at=budget_ends_at)
            fleet = replace(fleet, rules=rules)
            if fleet.phase is Phase.UP:
                more = (r for r in renew if r in fleet.roles and r not in fleet.to_renew)
                fleet = replace(fleet, to_renew=(*fleet.to_renew, *more))
        case Exited(role, code):
            return _exited(fleet, role, code, now)
        case StopRequested():
            if fleet.phase in (Phase.STOPPING, Phase.KILLING):
                return _kill(fleet)
            return _stop(fleet, Outcome("interrupted"), now)
        case PauseRequested():
            if fleet.phase not in (Phase.STOPPING, Phase.KILLING):
                return _stop(fleet, Outcome("paused"), now)
    return fleet, []


def _tick(fleet: Fleet, now: float) -> tuple[Fleet, list[Action]]:
    waited, rules = now - fleet.since, fleet.rules
    match fleet.phase:
        case Phase.STOPPING:
            return _kill(fleet) if waited >= rules.stop_s else _stop_servers(fleet)
        case Phase.KILLING:
            return fleet, []
        case Phase.DRAINING:
            workers_left = any(fleet.roles[role].alive for role in rules.ends_when_sampled)
            if fleet.published and (not workers_left or waited >= rules.drain_s):
                return _stop(fleet, Outcome("finished"), now)
            if waited >= rules.publish_s:
                return _stop(fleet, Outcome("unpublished"), now)
        case Phase.UP:
            if rules.budget_ends_at is not None and now >= rules.budget_ends_at:
                return _stop(fleet, Outcome("over_budget"), now)
            fleet, actions = _renew(fleet, now)
            return _start_due(fleet, now, actions)
    return _start_due(fleet, now, [])


def _start_due(fleet: Fleet, now: float, actions: list[Action]) -> tuple[Fleet, list[Action]]:
    for name, role in fleet.roles.items():
        due = role.state is State.BACKOFF and now >= role.retry_at
        if due or role.state is State.WAITING:
            fleet = _with(
                fleet, name, state=State.STARTING, restarts=role.restarts + (1 if due else 0)
            )
            actions = [*actions, Start(name)]
    return fleet, actions


def _renew(fleet: Fleet, now: float) -> tuple[Fleet, list[Action]]:
    """Gives the next role its turn once the one before runs again."""
    if fleet.renewing is not None:
        role = fleet.roles[fleet.renewing]
        if role.state is State.RENEWING and now >= role.retry_at:
            return _with(fleet, fleet.renewing, retry_at=inf), [Kill(fleet.renewing)]
        if role.state not in (State.RUNNING, State.FINISHED):
            return fleet, []
    if not fleet.to_renew:
        return replace(fleet, renewing=None), []
    name, *rest = fleet.to_renew
    fleet = replace(fleet, renewing=name, to_renew=tuple(rest))
    if not fleet.roles[name].alive:  # whenever it starts, it reads what is there by then
        return fleet, []
    fleet = _with(fleet, name, state=State.RENEWING, retry_at=now + fleet.rules.stop_s)
    return fleet, [Stop(name)]


def _exited(fleet: Fleet, role: str, code: int, now: float) -> tuple[Fleet, list[Action]]:
    if fleet.phase in (Phase.STOPPING, Phase.KILLING):
        return _with(fleet, role, state=_at_rest(fleet.outcome)), []
    if code == 0 and role in fleet.rules.ends_run and fleet.trained:
        fleet = _with(fleet, role, state=State.FINISHED)
        drained = replace(fleet, phase=Phase.DRAINING, since=now, renewing=None, to_renew=())
        return drained, []
    draining = fleet.phase is Phase.DRAINING
    if role in fleet.rules.ends_when_sampled and (draining or (code == 0 and fleet.sampled)):
        return _with(fleet, role, state=State.FINISHED), []
    # Any other exit 0 is a death too: someone sent it SIGTERM, and the run needs it.
    if code == EXIT_FINAL:
        fleet = _with(fleet, role, state=State.FAILED)
        return _stop(fleet, Outcome("stopped", role, code), now)
    if fleet.roles[role].state is State.RENEWING:
        return _with(fleet, role, state=State.WAITING), []
    deaths = fleet.roles[role].deaths_in_a_row + 1
    if deaths > fleet.rules.restarts:
        fleet = _with(fleet, role, state=State.FAILED, deaths_in_a_row=deaths)
        return _stop(fleet, Outcome("failed", role, code), now)
    pause = min(BACKOFF_MAX_S, BACKOFF_FIRST_S * 2 ** (deaths - 1))
    return _with(fleet, role, state=State.BACKOFF, deaths_in_a_row=deaths, retry_at=now + pause), []


def _stop(fleet: Fleet, outcome: Outcome, now: float) -> tuple[Fleet, list[Action]]:
    for name, role in fleet.roles.items():
        if role.state is State.BACKOFF:
            fleet = _with(fleet, name, state=_at_rest(outcome))
    fleet = replace(
        fleet, phase=Phase.STOPPING, outcome=outcome, since=now, renewing=None, to_renew=()
    )
    return fleet, [Stop(name) for name in _alive(fleet) if name not in fleet.rules.servers]


def _stop_servers(fleet: Fleet) -> tuple[Fleet, list[Action]]:
    alive = _alive(fleet)
    if fleet.servers_stopped or not fleet.rules.servers.issuperset(alive):
        return fleet, []
    return replace(fleet, servers_stopped=True), [Stop(name) for name in alive]


def _at_rest(outcome: Outcome | None) -> State:
    """What a role is that was stopped: finished with the run, or waiting for the next `apply`."""
    return State.FINISHED if outcome and outcome.kind == "finished" else State.WAITING


def _kill(fleet: Fleet) -> tuple[Fleet, list[Action]]:
    return replace(fleet, phase=Phase.KILLING), [Kill(name) for name in _alive(fleet)]


def _alive(fleet: Fleet) -> list[str]:
    return [name for name, role in fleet.roles.items() if role.alive]


def _with(fleet: Fleet, role: str, **changes: object) -> Fleet:
    changed = replace(fleet.roles[role], **changes)  # type: ignore[arg-type]
    return replace(fleet, roles={**fleet.roles, role: changed})
