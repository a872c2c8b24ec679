"""Cost of a run's hardware, from the prices in the spec."""

from __future__ import annotations

from dataclasses import dataclass

from runspec.core.models.hardware import device_count
from runspec.core.spec.islands import island_names, island_spec
from runspec.core.spec.role_names import island_role
from runspec.core.spec.schema import Hardware, RunSpec


@dataclass(frozen=True)
class Cost:
    """Cost in the currency of `price_per_hour`."""

    per_hour: float
    by_role: dict[str, float]
    """Cost an hour of `learner`, islands, the pools by name, and `validators`; only those with a
    price."""
    run: float | None
    """Cost of all steps; None if their time is unknown."""


def hourly_price(spec: RunSpec) -> float | None:
    """Return the sum of devices times `price_per_hour`: learner, islands, pools x replicas,
    validators.

    Hardware without a price costs nothing. Hardware without a count has one device. None if nothing
    has a price.
    """
    prices = hourly_prices(spec)
    return sum(prices.values()) if prices else None


def hourly_prices(spec: RunSpec) -> dict[str, float]:
    """Return `hourly_price` by role: `learner`, island-<name>, the pools by name, `validators`."""
    prices = {"learner": _price(spec.learner.hardware, 1, spec.learner.mesh.slices)}
    for name in island_names(spec)[1:]:
        own = island_spec(spec, name).learner
        prices[island_role(name)] = _price(own.hardware, 1, own.mesh.slices)
    for pool in spec.samplers:
        prices[pool.name] = _price(pool.hardware, pool.replicas)
    if spec.verify.hardware is not None:
        prices["validators"] = _price(spec.verify.hardware, spec.verify.validators)
    return {role: price for role, price in prices.items() if price is not None}


def cost(spec: RunSpec, run_s: float | None) -> Cost | None:
    """Return the cost of an hour and of the whole run; None if nothing has a price.

    Args:
        spec: names hardware, prices, replicas.
        run_s: seconds of all steps, if known.
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
