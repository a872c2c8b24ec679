"""Why a run does not learn, by its own figures: each cause with its numbers and the spec's fields.

Pure over metrics.jsonl, the spec and the grader's failures.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from runspec.core.spec.schema import RunSpec
from runspec.local.formatting import number, share
from runspec.local.metrics import Row

NEWEST = 20
"""Steps that are judged. With fewer nothing is said."""
RISE = 2.0
"""Standard errors of the difference that a rise must exceed."""
SOLVED = 0.95
"""From this task reward on a run has nothing left to learn."""
MOST_EQUAL = 0.8
"""Share of groups without a difference in reward that starves a run."""
MOST_FAILED = 0.2
"""Share of groups at which the grader failed."""
NEARLY_ALL = 0.95
"""Mean length over the longest possible one."""
COLLAPSED_NATS, COLLAPSED = 0.05, 0.2
"""Entropy, and its share of the first steps', below both of which it has collapsed."""
CLIPPED = 0.3
"""Share of tokens that the clip takes out of the gradient."""
DRIFT_NATS = 0.1
"""Mean |log-prob difference| between learner and samplers from which lag counts as the cause."""


@dataclass(frozen=True)
class Cause:
    """One reason why a run does not learn."""

    name: str
    """One word, for programs."""
    text: str
    """What was measured, over the newest steps."""
    fields: tuple[str, ...]
    """Fields of the spec to look at."""


def diagnose(spec: RunSpec, rows: Sequence[Row], failed_groups: int = 0) -> list[Cause]:
    """Return why the newest steps did not learn, the likeliest cause first; empty if they did.

    Args:
        spec: of the run; runs on documents have no diagnosis.
        rows: metrics.jsonl, a row a step, in order.
        failed_groups: groups that the run lost because the grader failed.
    """
    newest = rows[-NEWEST:]
    if spec.supervised is not None or len(newest) < NEWEST or is_learning(rows):
        return []
    found = (judge(spec, rows, newest, failed_groups) for judge in _JUDGES)
    return [cause for cause in found if cause is not None]


def is_learning(rows: Sequence[Row]) -> bool:
    """Return whether the newest steps earn more than the ones before, or all there is to earn.

    Means of `NEWEST` steps are compared; without as many before, the halves of them are.
    """
    if (_mean(rows[-NEWEST:], "task_reward") or 0.0) >= SOLVED:
        return True
    before, after = rows[-2 * NEWEST : -NEWEST], rows[-NEWEST:]
    if len(before) < NEWEST:
        before, after = after[: NEWEST // 2], after[NEWEST // 2 :]
    return any(_rose(before, after, key) for key in ("task_reward", "reward"))


def _rose(before: Sequence[Row], after: Sequence[Row], key: str) -> bool:
    first, last = _known(before, key), _known(after, key)
    if len(first) < 2 or len(last) < 2:
        return False
    error = math.sqrt(_variance(first) / len(first) + _variance(last) / len(last))
    rise = sum(last) / len(last) - sum(first) / len(first)
    return rise > max(RISE * error, 1e-6)


_Judge = Callable[[RunSpec, Sequence[Row], Sequence[Row], int], Cause | None]


def _nothing_right(
    spec: RunSpec, rows: Sequence[Row], newest: Sequence[Row], failed: int
) -> Cause | None:
    if _mean(newest, "task_reward") != 0.0:
        return None
    return Cause(
        "NothingRight",
        f"no answer was right in {NEWEST} steps",
        ("data.sources", "model", *_of_pools(spec, "max_new_tokens")),
    )


def _grader_fails(
    spec: RunSpec, rows: Sequence[Row], newest: Sequence[Row], failed: int
) -> Cause | None:
    groups = len(rows) * spec.grpo.prompts_per_step
    part = failed / (failed + groups)
    if part < MOST_FAILED:
        return None
    terms = (f"reward.{term.name}.timeout" for term in spec.reward if term.targets is None)
    return Cause("GraderFails", f"the grader failed at {share(part)} of all groups", tuple(terms))


def _equal_groups(
    spec: RunSpec, rows: Sequence[Row], newest: Sequence[Row], failed: int
) -> Cause | None:
    filtered = sum(_known(newest, "filtered_groups"))
    trained = sum(_known(newest, "trained_rollouts")) / spec.grpo.group_size
    if not filtered or filtered / (filtered + trained) < MOST_EQUAL:
        return None
    part = share(filtered / (filtered + trained))
    right = number(_mean(newest, "task_reward"))
    return Cause(
        "EqualGroups",
        f"in {part} of the groups all answers earned the same; the task reward is {right}",
        ("data.sources.NAME.solve_rate", "algorithm.group_size"),
    )


def _cut_off(
    spec: RunSpec, rows: Sequence[Row], newest: Sequence[Row], failed: int
) -> Cause | None:
    longest = max(pool.max_new_tokens for pool in spec.samplers)
    length = _mean(newest, "length_mean")
    if length is None or length < NEARLY_ALL * longest:
        return None
    text = f"the mean output has {number(length)} tokens, and {longest} are the most"
    return Cause("CutOff", text, _of_pools(spec, "max_new_tokens"))


def _collapsed(
    spec: RunSpec, rows: Sequence[Row], newest: Sequence[Row], failed: int
) -> Cause | None:
    first, last = _mean(rows[:NEWEST], "entropy"), _mean(newest, "entropy")
    if first is None or last is None or last > min(COLLAPSED_NATS, COLLAPSED * first):
        return None
    text = f"the entropy fell from {number(first)} to {number(last)} nats a token"
    fields = ("algorithm.entropy_coef", "optimizer.lr", *_of_pools(spec, "sampling.temperature"))
    return Cause("EntropyCollapsed", text, fields)


def _clipped(
    spec: RunSpec, rows: Sequence[Row], newest: Sequence[Row], failed: int
) -> Cause | None:
    sides = ("clip_fraction_low", "clip_fraction_high", "clip_fraction_delta")
    part = sum(_mean(newest, side) or 0.0 for side in sides)
    if part < CLIPPED:
        return None
    text = f"the clip takes {share(part)} of the tokens out of the gradient"
    return Cause("RatioClipped", text, ("algorithm.clip", "optimizer.lr", "algorithm.async_level"))


def _stale(spec: RunSpec, rows: Sequence[Row], newest: Sequence[Row], failed: int) -> Cause | None:
    lag, drift = _mean(newest, "lag_mean"), _mean(newest, "policy_drift")
    most = spec.grpo.async_level
    if not most or lag is None or lag < most - 0.1 or (drift or 0.0) < DRIFT_NATS:
        return None
    return Cause(
        "LagAtLimit",
        f"rollouts are {number(lag)} steps old, and at most {most}; the policy has moved "
        f"{number(drift)} nats a token since",
        ("algorithm.async_level", "optimizer.lr", "algorithm.importance.cap"),
    )


def _length_outweighs(
    spec: RunSpec, rows: Sequence[Row], newest: Sequence[Row], failed: int
) -> Cause | None:
    terms = [term.name for term in spec.reward if term.targets is not None]
    task, reward = _mean(newest, "task_reward"), _mean(newest, "reward")
    if not terms or task is None or reward is None or task - reward <= max(task, 1e-9):
        return None
    text = f"the length term takes {number(task - reward)}, the task gives {number(task)}"
    return Cause("LengthOutweighs", text, tuple(f"reward.{name}.alpha" for name in terms))


def _skipped(
    spec: RunSpec, rows: Sequence[Row], newest: Sequence[Row], failed: int
) -> Cause | None:
    steps = sum(skipped > 0 for skipped in _known(newest, "skipped_updates"))
    if steps < NEWEST // 2:
        return None
    text = f"updates were skipped in {steps} of {NEWEST} steps: their gradients are not finite"
    return Cause("UpdatesSkipped", text, ("optimizer.lr", "optimizer.clip_norm", "learner"))


_JUDGES: tuple[_Judge, ...] = (
    _grader_fails,
    _skipped,
    _cut_off,
    _nothing_right,
    _equal_groups,
    _collapsed,
    _clipped,
    _stale,
    _length_outweighs,
)
"""The likeliest causes first."""


def cause_lines(causes: Sequence[Cause]) -> Iterator[str]:
    """Yield a line for each cause."""
    for cause in causes:
        yield f"{cause.name}: {cause.text} (look at {', '.join(cause.fields)})"


def _of_pools(spec: RunSpec, field: str) -> tuple[str, ...]:
    return tuple(f"samplers.{pool.name}.{field}" for pool in spec.samplers)


def _known(rows: Sequence[Row], key: str) -> list[float]:
    return [row[key] for row in rows if isinstance(row.get(key), int | float)]


def _mean(rows: Sequence[Row], key: str) -> float | None:
    values = _known(rows, key)
    return sum(values) / len(values) if values else None


def _variance(values: Sequence[float]) -> float:
    mean = sum(values) / len(values)
    return sum((value - mean) ** 2 for value in values) / (len(values) - 1)
