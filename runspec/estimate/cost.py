"""What the hardware of a run costs, where the spec names prices."""

from __future__ import annotations

from dataclasses import dataclass

from runspec.estimate.hardware import device_count
from runspec.spec.schema import Hardware, RunSpec


@dataclass(frozen=True)
class Cost:
    """In the currency of `price_per_hour`."""

    per_hour: float
    by_role: dict[str, float]
    """Per hour: `learner`, the pools by name, `validators`; who has no price is left out."""
    run: float | None
    """Of all steps; None where their time is not known."""


def cost(spec: RunSpec, step_s: float | None) -> Cost | None:
    """Sum over the roles of devices x price; None where nothing has a price.

    Args:
        spec: hardware, prices, replicas, steps.
        step_s: time of a step, where it is known.
    """
    roles: dict[str, tuple[Hardware | None, int, int]] = {
        "learner": (spec.learner.hardware, 1, spec.learner.mesh.slices),
        **{pool.name: (pool.hardware, pool.replicas, 1) for pool in spec.samplers},
        "validators": (spec.verify.hardware, spec.verify.validators, 1),
    }
    by_role: dict[str, float] = {}
    for role, (hardware, members, slices) in roles.items():
        if hardware is not None and hardware.price_per_hour is not None:
            devices = members * (device_count(hardware, slices) or 1)
            by_role[role] = devices * hardware.price_per_hour
    if not by_role:
        return None
    per_hour = sum(by_role.values())
    run = None if step_s is None else per_hour * spec.steps * step_s / 3600
    return Cost(per_hour, by_role, run)
