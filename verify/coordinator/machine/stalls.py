"""Why the next step cannot be closed, and what to do about it: pure functions of a State."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from verify.coordinator.machine.events import GroupGrade
from verify.coordinator.machine.state import State, Tally

RUN_DIR = "RUN_DIR"
"""Placeholder of the run directory in a remedy; a State does not have it."""
_REPAIR_GRADER = (
    "repair the grader, or the rows that it cannot read; `python -m sampler grade FILE.jsonl` "
    "tries it on answers from a file (docs/rewards.md)"
)
_CHECK_VALIDATORS = (
    f"{RUN_DIR}/logs/coordinator.log names these submissions and what failed (docs/coordinator.md)"
)
_CHECK_WORKERS = (
    f"check `runspec workers {RUN_DIR}` and the workers' logs (`runspec logs {RUN_DIR}`); if they "
    "are only slow, raise verify.lease_timeout or add samplers"
)
_LOOK_AT_REJECTION = (
    "the last rejection names the check and its number (docs/verify.md says what each check "
    "compares), and `runspec workers` names the worker"
)
_SEE_LOGS = f"check the logs of the learner and the publisher (`runspec logs {RUN_DIR}`)"
_WAIT_LONGER = (
    f"check the log of the role that it waited for (`runspec logs {RUN_DIR}`); if that is only "
    "slow, raise algorithm.fill.deadline"
)
_SOLVE_RATES = (
    f"measure it: `python -m sampler solve-rates {RUN_DIR}/spec.json --source NAME --model "
    f"{RUN_DIR}/initial --out rates.parquet`; then "
)
_EASIER = (
    "take easier problems (data.sources.NAME.solve_rate bounds them), a stronger model or a longer "
    "warm start"
)
_HARDER = "take harder problems (data.sources.NAME.solve_rate bounds them)"
_BETWEEN = "keep the problems between (data.sources.NAME.solve_rate, say min: 0.1 and max: 0.9)"
_CHECK_ISLANDS = (
    f"check the islands' logs (`runspec logs {RUN_DIR}`); if they are only slow, raise "
    "learner.islands.deadline; with a lower learner.islands.quorum the run goes on without them"
)
_FORM = (
    "data.thinking says what of an output is graded (`none` for a model that does not think); a "
    "model that thinks may need data.think_prefill, a system_prompt that asks for </think>, or a "
    "larger samplers.NAME.max_new_tokens to end in"
)
_NO_FILTER = "; or train such groups too, with algorithm.filters.zero_variance: false"


@dataclass(frozen=True)
class Stalled:
    """The run cannot go on."""

    reason: str
    remedy: str


def unfilled(state: State, number: int, *, had: int, now: float) -> Stalled:
    """Return why an open step has too few groups.

    Args:
        state: state of the run.
        number: the step, the next to close.
        had: number of groups that it could train.
        now: seconds since the epoch.
    """
    policy, step = state.policy, state.steps[number]
    losses = _losses(state, state.tallies.get(number, Tally()))
    parts = [
        f"step {number} stalled: {had} of {policy.groups} groups, at least {policy.min_groups} "
        f"needed, after {now - step.since:.0f} s and {step.leased} groups leased "
        f"(max_groups allows {policy.max_groups})",
        *(text for _, text, _ in losses),
    ]
    return Stalled("; ".join(parts), losses[0][2])


def unopened(state: State, now: float) -> Stalled:
    """Return what a step waits for that could not be opened."""
    wait_longer = _SEE_LOGS if state.policy.rows_per_step else _WAIT_LONGER
    return Stalled(
        f"step {state.next_close} stalled: not opened after {now - state.progress:.0f} s; "
        f"waited for {waited_for(state)}",
        wait_longer,
    )


def uncommitted(state: State, now: float) -> Stalled:
    """Return the stall of a run whose islands did not offer enough shares in time."""
    since = now if state.islands.since is None else state.islands.since
    return Stalled(
        f"step {state.islands.step} stalled: not committed {now - since:.0f} s after the first "
        f"share; waited for {_islands(state)}",
        _CHECK_ISLANDS,
    )


def banned(state: State) -> Stalled:
    """Return the stall of a run whose workers are all banned."""
    reason = next(state.bans[key] for key, worker in state.workers.items() if worker.own)
    return Stalled(
        f"step {state.next_close} stalled: every worker is banned, the run's own too: {reason}",
        _LOOK_AT_REJECTION,
    )


def waited_for(state: State) -> str:
    """Return what the next step to close waits for, for people."""
    uncommitted = ""
    if state.islands.step < state.next_close and (islands := _islands(state)):
        uncommitted = f"the share of step {state.islands.step} of {islands}"
    if state.finished:
        return uncommitted or "nobody: every step is closed"
    number, newest = state.next_close, state.newest
    awaited = [r for r in state.live if r.lease.step == number and r.awaited]
    if awaited:
        sampling = sorted({r.lease.worker[:16] for r in awaited if r.status == "open"})
        validating = sum(r.status == "submitted" for r in awaited)
        parts = [f"worker {worker}" for worker in sampling]
        parts += [f"validators ({validating} submissions)"] if validating else []
        return ", ".join(parts)
    needed = max(0, number - state.policy.async_level)
    if newest is None or newest.version < needed:
        if uncommitted:
            return uncommitted
        had = "none" if newest is None else newest.version
        whom, at_least = "the publisher", ""
        if state.policy.rows_per_step and newest is not None:
            whom, at_least = "the learner", " or a newer one"
        return f"{whom}: version {needed}{at_least} is needed, the newest published is {had}"
    if state.policy.rows_per_step:
        return "nobody: the next step is being signed"
    if state.workers:
        return f"a lease request of any of the {len(state.workers)} registered workers"
    return "a worker to register"


def _islands(state: State) -> str:
    """Return the learner islands whose shares the next commit lacks; empty if it lacks none."""
    if state.policy.islands is None:
        return ""
    missing = state.islands.missing(state.policy.islands)
    return ", ".join(f"island {name} ({why})" for name, why in missing.items())


def _losses(state: State, tally: Tally) -> list[tuple[int, str, str]]:
    """Return the reasons for which a step lost groups, the largest loss first.

    Each has the number of groups, the reason for people, and the remedy.
    """
    dropped = sum(grade.outcome == "dropped" for grade in tally.grades)
    filtered = [grade for grade in tally.grades if grade.outcome == "filtered"]
    rejected = tally.rejected_rollouts // state.policy.group_size
    grader = f"{dropped} groups dropped by the grader, the newest: {state.last_fault}"
    rejections = (
        f"{tally.rejected_submissions} submissions rejected ({rejected} groups), last rejection: "
        f"{tally.last_rejection}"
    )
    aside = f"{tally.set_aside_groups} groups of submissions that validators could not judge"
    losses = [
        (dropped, grader, _REPAIR_GRADER),
        (len(filtered), *_zero_variance(filtered)),
        (rejected, rejections, _LOOK_AT_REJECTION),
        (tally.set_aside_groups, aside, _CHECK_VALIDATORS),
        (tally.expired_groups, f"{tally.expired_groups} groups withheld or late", _CHECK_WORKERS),
    ]
    return sorted((loss for loss in losses if loss[0]), key=lambda loss: -loss[0])


def _zero_variance(filtered: Sequence[GroupGrade]) -> tuple[str, str]:
    """Return text and remedy of the groups whose rewards are all equal."""
    rewards = [grade.task_reward for grade in filtered] or [0.0]
    if filtered and all(grade.answered == 0 for grade in filtered):
        text = (
            f"{len(filtered)} groups without an answer in the form that the run asks for: an end "
            "token and, where the thinking is required, </think> before it"
        )
        return text, _FORM
    if max(rewards) <= 0.0:
        solves, change = "solves none of these problems", _EASIER
    elif min(rewards) >= 1.0:
        solves, change = "solves all of these problems", _HARDER
    else:
        solves, change = "solves each of these problems always or never", _BETWEEN
    text = (
        f"{len(filtered)} groups filtered: all rewards of a group are equal; the model "
        f"{solves} (mean task reward {sum(rewards) / len(rewards):.3g})"
    )
    return text, f"{_SOLVE_RATES}{change}{_NO_FILTER}"
