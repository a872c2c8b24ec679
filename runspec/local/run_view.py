"""View of a run at one moment, read from its directory and its ledger alone.

`status`, `describe`, `wait`, the page and the report draw from it. Its conditions are like those of
Kubernetes: each True, False or Unknown, why, and since when.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

from broadcast.layout import manifest_name, stored_versions
from runspec.core.errors import UserError, duration, number
from runspec.core.process import EXIT_FINAL, load_endpoints
from runspec.core.schema import RunSpec
from runspec.core.schema.load import load_resolved
from runspec.core.schema.role_names import DRAWN, WARM_START
from runspec.estimate.assumed import hourly_price
from runspec.local.backend import birth
from runspec.local.diagnosis import (
    Cause,
    alarm_text,
    diagnose,
    dropped_text,
    results_of,
    unsolved_text,
)
from runspec.local.endpoints import coordinator_status
from runspec.local.metrics import Row, read_rows, step_gaps
from runspec.local.progress import stages
from runspec.local.run_dir import holder
from runspec.local.state import EventRow, RoleRow, RunRow, RunState, SessionRow
from verify.coordinator.ledger import Dropped, read_dropped
from verify.formats.documents import Evaluated

EVENTS = 10
REMEDY = "; remedy: "
"""Between the cause and the remedy in the reason of a run that failed."""
SLOW = 5.0
"""A step is late after so many times the mean of the last ones."""
SOON_S = 60.0
"""No step is late before this, however quick the last ones were."""
FIRST_STEP_S = 5400.0
"""In a supervised run the first step is late after this; its corpus may have to be made."""
_LAST = 10
_GOES_ON = ("starting", "running")
"""Recorded states of a run that its supervisor works on."""


@dataclass(frozen=True)
class Condition:
    """One thing that does or does not hold of a run."""

    type: str
    status: Literal["True", "False", "Unknown"]
    reason: str
    """One word, for programs."""
    message: str
    """For people."""
    since: float | None = None
    """Seconds since the epoch; None where nothing says when."""


@dataclass(frozen=True)
class RunView:
    """A run, looked at once. Times are seconds since the epoch."""

    directory: Path
    spec: RunSpec
    at: float
    """When it was looked at."""
    held_by: str | None
    """Its supervisor, in words."""
    run: RunRow | None
    """None before the first session."""
    session: SessionRow | None
    """The newest."""
    roles: Sequence[RoleRow]
    events: Sequence[EventRow]
    """The newest, oldest first."""
    rows: Sequence[Row]
    """metrics.jsonl, a row a trained step, in order."""
    versions: Sequence[int]
    """Policy versions that the origin serves, in order."""
    published_at: float | None
    """When the newest of them came out."""
    wall_s: float
    """Seconds that the run was up, over all its sessions."""
    dropped: Dropped = field(default_factory=Dropped)
    """Failures of validators and graders."""
    ledger_unread: str = ""
    """Why nothing is known of that; empty where it is."""
    stages: Mapping[str, str] = field(default_factory=dict)
    """Long stages in which roles of a live run are, by role."""

    @property
    def alive(self) -> bool:
        """Whether it goes on; when it has ended its supervisor still holds it for the report."""
        return self.held_by is not None and (self.run is None or self.run.state in _GOES_ON)

    @property
    def lost(self) -> bool:
        """Whether its supervisor died before it could record the end of the run."""
        return not self.alive and (self.run is None or self.run.state in _GOES_ON)

    @property
    def state(self) -> str:
        """starting, running, paused, interrupted, failed or finished."""
        if self.lost:
            return "interrupted"
        return self.run.state if self.run else "starting"

    @property
    def reason(self) -> str:
        """Why it is in that state, and what to do about it."""
        if self.lost:
            return "its supervisor is gone; resume it to go on"
        return self.run.reason if self.run else ""

    @property
    def short_reason(self) -> str:
        """The reason without the remedy."""
        return self.reason.partition(REMEDY)[0]

    @property
    def newest(self) -> Row:
        """The row of the newest step; empty before there is one."""
        return self.rows[-1] if self.rows else {}

    @property
    def trained(self) -> int:
        """Steps that are trained."""
        return int(self.newest.get("step", -1)) + 1

    @property
    def published(self) -> int | None:
        """The newest version that the origin serves."""
        return self.versions[-1] if self.versions else None

    @property
    def begun(self) -> float | None:
        """When the newest session began."""
        return self.session.started if self.session else None

    @property
    def ended(self) -> float | None:
        """When a run that is not alive was last up."""
        return self.session.seen if self.session and not self.alive else None

    @property
    def last_step(self) -> float | None:
        """When a step of this session was last trained."""
        at = self.newest.get("time")
        return at if isinstance(at, float) and at >= (self.begun or 0.0) else None

    @property
    def idle_s(self) -> float:
        """Seconds since a step of this session was trained, or since it began."""
        return max(0.0, self.at - (self.last_step or self.begun or self.at))

    @property
    def late_after_s(self) -> float:
        """Seconds without a trained step after which the run counts as stalled.

        Five times the mean of the last steps, and a minute at least. Before there are two to take a
        mean of: `algorithm.fill.deadline`, or `FIRST_STEP_S` in a supervised run.
        """
        gaps = step_gaps(self.rows, _LAST)
        if not gaps and self.spec.supervised is not None:
            return FIRST_STEP_S
        if not gaps:
            return max(SOON_S, self.spec.grpo.fill.deadline)
        return max(SOON_S, SLOW * sum(gaps) / len(gaps))

    @cached_property
    def results(self) -> list[Evaluated]:
        """Results of evaluations, in the order of versions."""
        return results_of(self.directory, self.rows)

    @cached_property
    def causes(self) -> list[Cause]:
        """Why the newest steps did not learn, or not what held-out problems need."""
        return diagnose(self.spec, self.rows, self.dropped.by_grader, self.results)

    @cached_property
    def conditions(self) -> dict[str, Condition]:
        """All conditions by type, in the order of `TYPES`; docs/runspec.md has the rules."""
        return {type_: Condition(type_, *judge(self)) for type_, judge in _JUDGES.items()}

    @cached_property
    def coordinator(self) -> dict[str, Any]:
        """The status that a live run's coordinator answers; empty without an answer."""
        endpoints = load_endpoints(self.directory) if self.alive else None
        return coordinator_status(endpoints.coordinator) if endpoints else {}


def look_at(
    run_dir: Path,
    *,
    events: int | None = EVENTS,
    ledger: bool = True,
    newest_bytes: int | None = None,
) -> RunView:
    """Reads a run directory, and the ledger where that lies elsewhere.

    Args:
        run_dir: of the run.
        events: how many of the newest; None for all.
        ledger: whether to read that, which a database may be slow to answer.
        newest_bytes: how much of metrics.jsonl's end; None for all.

    Raises:
        UserError: its spec or its state cannot be read.
    """
    spec, held_by = load_resolved(run_dir), holder(run_dir)
    store = run_dir / "store" / "origin"
    versions, published_at = stored_versions(store, spec.name), None
    if versions and (path := store / manifest_name(spec.name, versions[-1])).exists():
        published_at = path.stat().st_mtime
    dropped, unread = Dropped(), "" if ledger else "it was not read"
    if ledger:
        try:
            dropped = read_dropped(run_dir, spec)
        except UserError as error:
            unread = f"{error.place}: {error.thing}"
    with closing(RunState(run_dir)) as state:
        return RunView(
            directory=run_dir,
            spec=spec,
            at=time.time(),
            held_by=held_by,
            run=state.run(),
            session=state.session(),
            roles=state.roles() if held_by else [_unsupervised(role) for role in state.roles()],
            events=state.events(events),
            rows=read_rows(run_dir, newest_bytes),
            versions=versions,
            published_at=published_at,
            wall_s=state.wall_s(),
            dropped=dropped,
            ledger_unread=unread,
            stages=stages(run_dir / "logs") if held_by else {},
        )


def budget_limits(spec: RunSpec) -> dict[str, float]:
    """Return the hours up, over all sessions, at which each line of the budget is spent.

    They are by the line's path in the spec, the earliest first.

    `max_cost` is spent after max_cost / (price an hour of all hardware) hours; without a price it
    never is.
    """
    price, found = hourly_price(spec), dict[str, float]()
    if spec.budget.max_hours is not None:
        found["budget.max_hours"] = spec.budget.max_hours
    if spec.budget.max_cost is not None and price:
        found["budget.max_cost"] = spec.budget.max_cost / price
    return dict(sorted(found.items(), key=lambda item: item[1]))


def _unsupervised(role: RoleRow) -> RoleRow:
    """A role whose supervisor is gone, which may have died before it recorded the role's end."""
    if role.pid and birth(role.pid) == role.born:
        return role
    at_rest = role.state in ("waiting", "stopped", "finished", "failed")
    return replace(role, state=role.state if at_rest else "ended", pid=None)


_STAGES = (WARM_START, DRAWN)
_Judgement = tuple[Literal["True", "False", "Unknown"], str, str, float | None]
"""Status, reason, message and `since` of a condition."""


def _alive(seen: RunView) -> _Judgement:
    if seen.alive:
        return "True", "Supervised", f"held by {seen.held_by}", seen.begun
    return "False", "NotSupervised", "no process holds the run", seen.ended


def _ready(seen: RunView) -> _Judgement:
    if not seen.alive:
        return "False", "NotAlive", "no role is started", seen.ended
    # The stage that makes version 0 stays listed once it is done.
    roles = [r for r in seen.roles if not (r.name in _STAGES and r.state == "finished")]
    changed = max((role.since for role in roles), default=None)
    awaited = (r for r in roles if r.name in _STAGES or r.state != "running")
    not_running = [f"{r.name} ({r.state})" for r in awaited]
    if not roles or not_running:
        waiting = ", ".join(not_running) or "its roles"
        return "False", "RolesNotRunning", f"waits for {waiting}", changed
    return "True", "RolesRunning", f"{len(roles)} roles run", changed


def _training(seen: RunView) -> _Judgement:
    if not seen.alive:
        return "False", "NotAlive", "nothing is trained", seen.ended
    if seen.last_step is None:
        return "Unknown", "NoStepYet", "no step since it was started", seen.begun
    message = f"step {seen.trained} of {seen.spec.steps} was trained {duration(seen.idle_s)} ago"
    if seen.idle_s > seen.late_after_s:
        return "False", "NoStepLately", message, seen.last_step
    return "True", "StepTrained", message, seen.last_step


def _published(seen: RunView) -> _Judgement:
    due, supervised = seen.trained, seen.spec.supervised
    if supervised is not None and due != seen.spec.steps:
        due -= due % supervised.publish_every
    if seen.published is None:
        return "False", "NothingPublished", "no version is out", None
    if seen.published < due:
        message = f"version {seen.published} is out, {seen.trained} is trained"
        return "False", "Behind", message, seen.published_at
    return "True", "NewestOut", f"version {seen.published} is out", seen.published_at


def _logprob_alarm(seen: RunView) -> _Judgement:
    row = seen.newest
    if text := alarm_text(row):
        return "True", "AboveLimit", text, row.get("time")
    mean, limit = row.get("sampler_logprob_diff_mean"), row.get("sampler_logprob_limit")
    if mean is None:
        return "False", "NotCompared", "no log-probs were recomputed", None
    message = f"{number(mean)} apart on average, {number(limit)} are allowed"
    return "False", "WithinLimit", message, None


def _nothing_solved(seen: RunView) -> _Judgement:
    row = seen.newest
    if text := unsolved_text(row):
        return "True", "NoneRight", text, row.get("time")
    if row.get("task_reward") is None:
        return "False", "NotGraded", "no rollout was graded", None
    message = f"the task reward of the newest step is {number(row['task_reward'])}"
    return "False", "SomeRight", message, None


def _set_aside(seen: RunView) -> _Judgement:
    if seen.ledger_unread:
        return "Unknown", "LedgerNotRead", seen.ledger_unread, None
    if not seen.dropped.set_aside:
        return "False", "NoneGivenUp", "every one was judged", None
    message = (
        f"validators failed at {seen.dropped.set_aside} submissions, whose groups were dropped: "
        "the coordinator's log names them (docs/coordinator.md)"
    )
    return "True", "ValidatorsFailed", message, seen.dropped.set_aside_at


def _grader_faults(seen: RunView) -> _Judgement:
    dropped = seen.dropped
    if seen.ledger_unread:
        return "Unknown", "LedgerNotRead", seen.ledger_unread, None
    if not dropped.by_grader:
        return "False", "NoneDropped", "it failed at no group", None
    text = dropped_text(dropped.by_grader, dropped.fault)
    return "True", "GroupsDropped", text, dropped.by_grader_at


def _stalled(seen: RunView) -> _Judgement:
    final = (event for event in seen.events if event.exit_code == EXIT_FINAL)
    gave_up = [each for each in final if each.role == "coordinator" and " stalled: " in each.text]
    if seen.state == "failed" and gave_up:
        return "True", "StepStalled", seen.short_reason, gave_up[-1].time
    if not seen.alive:
        return "False", "NotAlive", "nobody waits", seen.ended
    limit = duration(seen.late_after_s)
    since = seen.last_step or seen.begun
    if seen.idle_s > seen.late_after_s:
        message = f"no step for {duration(seen.idle_s)}; {limit} are expected at most"
        return "True", "NoStepLately", message, since
    return "False", "InTime", f"late after {limit}", since


def _state(state: str, reason: str, seen: RunView) -> _Judgement:
    progress = f"{seen.trained} of {seen.spec.steps} steps are trained"
    if seen.state == state:
        return "True", reason, seen.reason or progress, seen.ended
    return "False", f"Is{seen.state.capitalize()}", progress, None


_JUDGES: dict[str, Callable[[RunView], _Judgement]] = {
    "Alive": _alive,
    "Ready": _ready,
    "Training": _training,
    "Published": _published,
    "LogprobAlarm": _logprob_alarm,
    "NothingSolved": _nothing_solved,
    "SetAside": _set_aside,
    "GraderFaults": _grader_faults,
    "Stalled": _stalled,
    "Paused": partial(_state, "paused", "Paused"),
    "Failed": partial(_state, "failed", "RunFailed"),
    "Finished": partial(_state, "finished", "AllStepsTrained"),
}
TYPES = tuple(_JUDGES)
