"""Conditions of a run, as Kubernetes has them: each True, False or Unknown, why, and since when.

Pure over what was read from the run directory (`snapshot`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Literal

from runspec.core.process import EXIT_FINAL
from runspec.local.formatting import duration, number
from runspec.local.metrics import Row
from runspec.local.snapshot import Snapshot

Status = Literal["True", "False", "Unknown"]

SLOW = 5.0
"""A step is late after so many times the mean of the last ones."""
SOON_S = 60.0
"""No step is late before this, however quick the last ones were."""
FIRST_STEP_S = 5400.0
"""In a supervised run the first step is late after this; its corpus may have to be made."""
_LAST = 10


@dataclass(frozen=True)
class Condition:
    """One thing that does or does not hold of a run."""

    type: str
    status: Status
    reason: str
    """One word, for programs."""
    message: str
    """For people."""
    since: float | None
    """Seconds since the epoch; None where nothing says when."""


_Judgement = tuple[Status, str, str, float | None]
"""Status, reason, message and `since` of a condition."""


def late_after_s(seen: Snapshot) -> float:
    """Seconds without a trained step after which the run counts as stalled.

    Five times the mean of the last steps, and a minute at least. Before there are two to take a
    mean of: `algorithm.fill.deadline`, or `FIRST_STEP_S` in a supervised run.
    """
    times = [row["time"] for row in seen.rows[-_LAST - 1 :] if isinstance(row.get("time"), float)]
    gaps = [later - earlier for earlier, later in pairwise(times)]
    if not gaps and seen.spec.supervised is not None:
        return FIRST_STEP_S
    if not gaps:
        return max(SOON_S, seen.spec.grpo.fill.deadline)
    return max(SOON_S, SLOW * sum(gaps) / len(gaps))


def _alive(seen: Snapshot) -> _Judgement:
    started = seen.session.started if seen.session else None
    if seen.alive:
        return "True", "Supervised", f"held by {seen.held_by}", started
    ended = seen.session.seen if seen.session else None
    return "False", "NotSupervised", "no process holds the run", ended


def _ready(seen: Snapshot) -> _Judgement:
    if not seen.alive:
        return "False", "NotAlive", "no role is started", _ended(seen)
    changed = max((role.since for role in seen.roles), default=None)
    not_running = [f"{r.name} ({r.state})" for r in seen.roles if r.state != "running"]
    if not seen.roles or not_running:
        waiting = ", ".join(not_running) or "its roles"
        return "False", "RolesNotRunning", f"waits for {waiting}", changed
    return "True", "RolesRunning", f"{len(seen.roles)} roles run", changed


def _training(seen: Snapshot) -> _Judgement:
    if not seen.alive:
        return "False", "NotAlive", "nothing is trained", _ended(seen)
    last, idle_s = _last_step(seen), _idle_s(seen)
    if last is None:
        begun = seen.session.started if seen.session else None
        return "Unknown", "NoStepYet", "no step since it was started", begun
    message = f"step {seen.trained} of {seen.spec.steps} was trained {duration(idle_s)} ago"
    if idle_s > late_after_s(seen):
        return "False", "NoStepLately", message, last
    return "True", "StepTrained", message, last


def _published(seen: Snapshot) -> _Judgement:
    if seen.published is None:
        return "False", "NothingPublished", "no version is out", None
    if seen.published < _due_version(seen):
        message = f"version {seen.published} is out, {seen.trained} is trained"
        return "False", "Behind", message, seen.published_at
    return "True", "NewestOut", f"version {seen.published} is out", seen.published_at


def _due_version(seen: Snapshot) -> int:
    """Return the version that the newest trained step should have brought."""
    supervised = seen.spec.supervised
    if supervised is None or seen.trained == seen.spec.steps:
        return seen.trained
    return seen.trained - seen.trained % supervised.publish_every


def _logprob_alarm(seen: Snapshot) -> _Judgement:
    row = seen.rows[-1] if seen.rows else {}
    mean, limit = row.get("sampler_logprob_diff_mean"), row.get("sampler_logprob_limit")
    if row.get("sampler_logprob_alarm"):
        return "True", "AboveLimit", alarm_text(row), row.get("time")
    if mean is None:
        return "False", "NotCompared", "no log-probs were recomputed", None
    message = f"{number(mean)} apart on average, {number(limit)} are allowed"
    return "False", "WithinLimit", message, None


def _nothing_solved(seen: Snapshot) -> _Judgement:
    row = seen.rows[-1] if seen.rows else {}
    if text := unsolved_text(row):
        return "True", "NoneRight", text, row.get("time")
    if row.get("task_reward") is None:
        return "False", "NotGraded", "no rollout was graded", None
    message = f"the task reward of the newest step is {number(row['task_reward'])}"
    return "False", "SomeRight", message, None


def _set_aside(seen: Snapshot) -> _Judgement:
    if seen.ledger_unread:
        return "Unknown", "LedgerNotRead", seen.ledger_unread, None
    if not seen.dropped.set_aside:
        return "False", "NoneGivenUp", "every one was judged", None
    message = (
        f"validators failed at {seen.dropped.set_aside} submissions, whose groups were dropped: "
        "the coordinator's log names them (docs/coordinator.md)"
    )
    return "True", "ValidatorsFailed", message, seen.dropped.set_aside_at


def _grader_faults(seen: Snapshot) -> _Judgement:
    groups, fault, since = seen.dropped.by_grader, seen.dropped.fault, seen.dropped.by_grader_at
    if seen.ledger_unread:
        return "Unknown", "LedgerNotRead", seen.ledger_unread, None
    if not groups:
        return "False", "NoneDropped", "it failed at no group", None
    return "True", "GroupsDropped", dropped_text(groups, fault), since


def dropped_text(groups: int, newest: str) -> str:
    """Says how many groups the grader made a run lose, and what it failed with last."""
    return f"{groups} groups dropped by the grader, the newest: {newest}"


def alarm_text(row: Row) -> str:
    """Return the text of a step's alarm; empty without one."""
    if not row.get("sampler_logprob_alarm"):
        return ""
    mean, limit = row.get("sampler_logprob_diff_mean"), row.get("sampler_logprob_limit")
    return (
        f"step {row.get('step')}: the samplers' log-probs are {number(mean)} from the learner's on "
        f"average, verify.logprob_alarm is {number(limit)}"
    )


def unsolved_text(row: Row) -> str:
    """Return the text for a step whose rollouts were all wrong; empty where one was right."""
    if row.get("task_reward") != 0:
        return ""
    return (
        f"no rollout of step {row.get('step')} was right, so nothing is learned from it: read the "
        "answers in samples.jsonl, measure with `python -m sampler solve-rates`, then take easier "
        "problems or a better starting model (docs/first-run.md)"
    )


def _stalled(seen: Snapshot) -> _Judgement:
    gave_up = [
        event
        for event in seen.events
        if event.role == "coordinator"
        and f"exit code {EXIT_FINAL}" in event.text
        and " stalled: " in event.text
    ]
    if seen.state == "failed" and gave_up:
        return "True", "StepStalled", seen.short_reason, gave_up[-1].time
    if not seen.alive:
        return "False", "NotAlive", "nobody waits", _ended(seen)
    limit_s, idle_s = late_after_s(seen), _idle_s(seen)
    since = _last_step(seen) or (seen.session.started if seen.session else None)
    if idle_s > limit_s:
        message = f"no step for {duration(idle_s)}; {duration(limit_s)} are expected at most"
        return "True", "NoStepLately", message, since
    return "False", "InTime", f"late after {duration(limit_s)}", since


def _state(state: str, reason: str, seen: Snapshot) -> _Judgement:
    progress = f"{seen.trained} of {seen.spec.steps} steps are trained"
    if seen.state == state:
        return "True", reason, seen.reason or progress, _ended(seen)
    return "False", f"Is{seen.state.capitalize()}", progress, None


def _ended(seen: Snapshot) -> float | None:
    return seen.session.seen if seen.session and not seen.alive else None


def _last_step(seen: Snapshot) -> float | None:
    """When a step of this session was last trained."""
    at = seen.rows[-1].get("time") if seen.rows else None
    begun = seen.session.started if seen.session else 0.0
    return at if isinstance(at, float) and at >= begun else None


def _idle_s(seen: Snapshot) -> float:
    begun = seen.session.started if seen.session else seen.at
    return max(0.0, seen.at - (_last_step(seen) or begun))


_JUDGES: dict[str, Callable[[Snapshot], _Judgement]] = {
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


def conditions(seen: Snapshot) -> list[Condition]:
    """All conditions of a run, in the order of `TYPES`; docs/runspec.md says when each is true."""
    return [Condition(type_, *judge(seen)) for type_, judge in _JUDGES.items()]


def condition(types: Sequence[Condition], type_: str) -> Condition:
    """The one of a type; `type_` is one of `TYPES`."""
    return next(each for each in types if each.type == type_)
