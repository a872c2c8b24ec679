"""Steady state of a simulated run: time of a step, idle shares, bottleneck."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from statistics import fmean

from runspec.estimate.timeline import Interval, Model, Replica, Simulated, Step, simulate

FASTER = 0.9
"""Factor on the times of a role that is a tenth faster, for the gains."""
_STRETCHES = 24
"""Intervals of the steady state that are compared with its mean."""
_STEPS = 10
"""Simulated steps beyond those that the lag needs to reach the steady state."""

_MAX_LAG = 64
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
    """Trained share of a step's groups; below 1 if `fill.max_groups` is reached first."""
    gains: dict[str, float]
    """Share of the step's time that is saved if a role is a tenth faster, by role."""
    intervals: tuple[Interval, ...]
    """Tasks of all processes during `step_s`, for the interval that is most like the mean."""

    @property
    def bottleneck(self) -> str:
        """Role whose speed a step depends on most."""
        return max(self.gains, key=lambda role: self.gains[role])


def timeline(model: Model) -> Timeline:
    """Simulate until the steady state, and measure the later half of the steps.

    Args:
        model: the run; its `steps` are ignored, because the steady state is that of a long run.

    Raises:
        ValueError: as `simulate`.
    """
    model = _long_enough(model)
    run, settled, step_s = _measured(model)
    trained = [step.trained for step in settled]
    idle = _idle(run, model, trained[0], trained[-1])
    shorter = {
        role: 1.0 - _measured(changed)[2] / step_s if step_s else 0.0
        for role, changed in _one_role_faster(model).items()
    }
    return Timeline(
        step_s=step_s,
        idle=idle,
        first_rollouts_s=fmean((s.first_rollouts or 0.0) - (s.opened or 0.0) for s in settled),
        full_s=fmean((s.full or 0.0) - (s.opened or 0.0) for s in settled),
        start_s=run.steps[0].trained,
        lag=fmean(s.lag for s in settled),
        filled_share=fmean(s.kept for s in settled) / model.groups,
        gains=shorter,
        intervals=_typical(run, model, trained, step_s, idle),
    )


def _long_enough(model: Model) -> Model:
    """Return the model with enough steps to reach the steady state."""
    level = min(model.async_level, _MAX_LAG)
    return replace(model, steps=_STEPS + 3 * (level + 1), async_level=level)


def _typical(
    run: Simulated, model: Model, trained: list[float], step_s: float, idle: dict[str, float]
) -> tuple[Interval, ...]:
    """Return the interval of `step_s` whose idle shares are closest to the mean."""

    def unlike(until: float) -> float:
        here = _idle(run, model, until - step_s, until)
        return sum(abs(here[role] - idle[role]) for role in idle)

    start, spare = trained[0] + step_s, trained[-1] - trained[0] - step_s
    between = [start + spare * part / _STRETCHES for part in range(_STRETCHES)]
    typical = min(trained[1:] + between, key=unlike)
    first = typical - step_s
    return tuple(
        replace(i, start=max(i.start, first) - first, end=min(i.end, typical) - first)
        for i in run.intervals
        if i.end > first and i.start < typical
    )


def _measured(model: Model) -> tuple[Simulated, tuple[Step, ...], float]:
    """Return the simulated run, its steady steps, and the seconds from one to the next.

    Steady is the later half of the steps, without the last, during which nobody samples ahead.
    """
    run = simulate(model)
    settled = run.steps[model.steps // 2 : model.steps - model.async_level - 1]
    return run, settled, (settled[-1].trained - settled[0].trained) / (len(settled) - 1)


def _one_role_faster(model: Model) -> dict[str, Model]:
    check = model.check_s
    faster = {
        "learner": replace(model, train_s=FASTER * model.train_s),
        "broadcast": replace(
            model,
            publish_s=FASTER * model.publish_s,
            replicas=tuple(replace(r, fetch_s=FASTER * r.fetch_s) for r in model.replicas),
        ),
        "validators": replace(model, check_s=lambda lengths: FASTER * check(lengths)),
    }
    for pool in dict.fromkeys(replica.pool for replica in model.replicas):
        replicas = tuple(_faster(r) if r.pool == pool else r for r in model.replicas)
        faster[pool] = replace(model, replicas=replicas)
    return faster


def _faster(replica: Replica) -> Replica:
    sample = replica.sample_s
    return replace(
        replica,
        load_s=FASTER * replica.load_s,
        sample_s=lambda lengths: FASTER * sample(lengths),
    )


def _idle(run: Simulated, model: Model, start: float, end: float) -> dict[str, float]:
    """Return idle shares by role; publisher and links are one role, `broadcast`."""
    members = Counter({"learner": 1, "validators": model.validators})
    members.update(replica.pool for replica in model.replicas)
    if end <= start:
        return {}
    busy = dict.fromkeys(members, 0.0)
    travelling: list[tuple[float, float]] = []
    for interval in run.intervals:
        first, last = max(interval.start, start), min(interval.end, end)
        if first >= last:
            continue
        if interval.role in busy:
            busy[interval.role] += last - first
        elif interval.role in ("publisher", "broadcast"):
            travelling.append((first, last))
    idle = {
        role: 1.0 - busy[role] / (count * (end - start)) for role, count in members.items() if count
    }
    idle["broadcast"] = 1.0 - _covered(travelling) / (end - start)
    return idle


def _covered(stretches: list[tuple[float, float]]) -> float:
    """Return the length of the union of intervals."""
    total = last = 0.0
    for start, end in sorted(stretches):
        total += max(0.0, end - max(start, last))
        last = max(last, end)
    return total
