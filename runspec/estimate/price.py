"""What the hardware of a run costs, where the spec names prices."""

from __future__ import annotations

from dataclasses import dataclass

from runspec.core.models.hardware import device_count
from runspec.core.spec.schema import Hardware, RunSpec


@dataclass(frozen=True)
class Cost:
    """In the currency of `price_per_hour`."""

    per_hour: float
    by_role: dict[str, float]
    """Per hour: `learner`, the pools by name, `validators`; who has no price is left out."""
    run: float | None
    """Of all steps; None where their time is not known."""


def hourly_price(spec: RunSpec) -> float | None:
    """Devices times their `price_per_hour`: the learner, pools x replicas, and validators.

    Hardware that names no price costs nothing here, and counts as one device where the spec does
    not say how many it has. None where nothing has a price.
    """
    prices = hourly_prices(spec)
    return sum(prices.values()) if prices else None


def hourly_prices(spec: RunSpec) -> dict[str, float]:
    """`hourly_price` by role: `learner`, the pools by name, `validators`; those with a price."""
    prices = {"learner": _price(spec.learner.hardware, 1, spec.learner.mesh.slices)}
    for pool in spec.samplers:
        prices[pool.name] = _price(pool.hardware, pool.replicas)
    if spec.verify.hardware is not None:
        prices["validators"] = _price(spec.verify.hardware, spec.verify.validators)
    return {role: price for role, price in prices.items() if price is not None}


def cost(spec: RunSpec, run_s: float | None) -> Cost | None:
    """Cost of an hour and of the whole run; None where nothing has a price.

    Args:
        spec: hardware, prices, replicas.
        run_s: time of all steps, where it is known.
    """
    per_hour = hourly_price(spec)
    if per_hour is None:
        return None
    run = None if run_s is None else per_hour * run_s / 3600
    return Cost(per_hour, hourly_prices(spec), run)


def _price(hardware: Hardware, processes: int, slices: int = 1) -> float | None:
    if hardware.price_per_hour is None:
        return None
    return hardware.price_per_hour * (device_count(hardware, slices) or 1) * processes
