"""How much of its budget a run has used, and which limit ends it first. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from runspec.core.spec.schema import RunSpec
from runspec.estimate.price import hourly_price


@dataclass(frozen=True)
class Limit:
    """One line of the budget."""

    path: str
    """In the spec."""
    hours: float
    """Hours up, over all sessions, at which it is spent."""

    def left_s(self, wall_s: float) -> float:
        """Seconds that are left after `wall_s` seconds up; below zero once it is overdrawn."""
        return self.hours * 3600.0 - wall_s


def limits(spec: RunSpec) -> list[Limit]:
    """Return the limits that end the run, the earliest first.

    `max_cost` is spent after max_cost / (price an hour of all hardware) hours; without a price it
    never is.
    """
    found = []
    if spec.budget.max_hours is not None:
        found.append(Limit("budget.max_hours", spec.budget.max_hours))
    price = hourly_price(spec)
    if spec.budget.max_cost is not None and price:
        found.append(Limit("budget.max_cost", spec.budget.max_cost / price))
    return sorted(found, key=lambda limit: limit.hours)


def left_s(spec: RunSpec, wall_s: float) -> float | None:
    """Seconds until the first limit; None where there is none."""
    return min((limit.left_s(wall_s) for limit in limits(spec)), default=None)


def cost(spec: RunSpec, wall_s: float) -> float | None:
    """Return the cost of `wall_s` seconds of the hardware; None where nothing has a price."""
    price = hourly_price(spec)
    return None if price is None else price * wall_s / 3600.0
