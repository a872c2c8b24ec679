"""Steady state of a run that is simulated with its own replicas: times, idle shares, bottleneck."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import fmean

from runspec.core.models.config import ModelConfig
from runspec.core.spec.schema import RunSpec
from runspec.simulate.model import BROADCAST, LEARNER, VALIDATORS, Interval
from runspec.simulate.run import simulate

_STEPS = 10
"""Simulated steps beyond those that the lag needs to reach the steady state."""
_MAX_LAG = 8
"""Largest simulated `async_level`; a higher one counts as this."""


@dataclass(frozen=True)
class Timeline:
    """One step in the steady state; times in seconds."""

    step_s: float
    """Seconds from the end of one training step to the end of the next."""
    idle: dict[str, float]
    """Idle share of the time by role; for a pool, the mean of its replicas."""
    first_rollouts_s: float
    """Seconds from a step's first lease until its first submission is checked."""
    full_s: float
    """Seconds from a step's first lease until its batch is full."""
    start_s: float
    """Seconds from the publication of version 0 until the first step is trained."""
    lag: float
    """Mean over steps of the largest lag."""
    filled_share: float
    """Trained share of a step's groups; below 1 if `fill.max_groups` or `fill.deadline` ends it."""
    intervals: tuple[Interval, ...]
    """Tasks of all processes during `step_s`, for the step that is most like the mean."""

    @property
    def bottleneck(self) -> str:
        """Role that is idle for the least time."""
        return min(self.idle, key=lambda role: self.idle[role])


def timeline(spec: RunSpec, config: ModelConfig | None) -> tuple[Timeline | None, str]:
    """Simulate until the steady state, and measure the later half of the steps.

    Steady is the later half without the last steps, ahead of which nobody samples.

    Args:
        spec: spec of the run. Its steps and budget are ignored, because the steady state is that of
            a long run.
        config: shape of the model.

    Returns:
        The timeline and an empty text; or None and what the run waits for, if it trains too few
        steps.

    Raises:
        UserError: as `simulate`.
    """
    level = min(spec.grpo.async_level, _MAX_LAG)
    count = _STEPS + 3 * (level + 1)
    changes = {
        "steps": count,
        "algorithm": spec.grpo.model_copy(update={"async_level": level}),
        "budget": spec.budget.model_copy(update={"max_hours": None}),
    }
    run = simulate(spec.model_copy(update=changes), config)
    settled = run.steps[count // 2 : count - level - 1]
    ends = [step.trained_at for step in settled if step.trained_at is not None]
    if len(ends) < 2:
        return None, run.reason
    step_s = (ends[-1] - ends[0]) / (len(ends) - 1)
    idle = _idle(run.intervals, spec, ends[0], ends[-1])

    def unlike(ends: tuple[float, float]) -> float:
        here = _idle(run.intervals, spec, *ends)
        return sum(abs(here[role] - idle[role]) for role in idle)

    start = min(pairwise(ends), key=unlike)[0]
    return Timeline(
        step_s=step_s,
        idle=idle,
        first_rollouts_s=fmean(step.first_rollouts - step.opened for step in settled),
        full_s=fmean(step.closed - step.opened for step in settled),
        start_s=run.trained[0],
        lag=fmean(step.lag for step in settled),
        filled_share=fmean(step.groups for step in settled) / spec.grpo.prompts_per_step,
        intervals=tuple(
            replace(each, start=max(each.start - start, 0.0), end=min(each.end - start, step_s))
            for each in run.intervals
            if each.end > start and each.start < start + step_s
        ),
    ), ""


def _idle(
    intervals: tuple[Interval, ...], spec: RunSpec, start: float, end: float
) -> dict[str, float]:
    """Return idle shares by role; publisher and links count as one process."""
    members = {LEARNER: 1, BROADCAST: 1, VALIDATORS: spec.verify.validators}
    members |= {pool.name: pool.replicas for pool in spec.samplers}
    busy, travelled = dict.fromkeys(members, 0.0), start
    for each in sorted(intervals, key=lambda each: each.start):
        first, last = max(each.start, start), min(each.end, end)
        if each.role == BROADCAST:  # links work beside one another
            first, travelled = max(first, travelled), max(last, travelled)
        busy[each.role] += max(0.0, last - first)
    span = end - start
    return {role: 1 - busy[role] / (n * span) if span else 1.0 for role, n in members.items() if n}
