"""Rules on the budget: cost and hours."""

from __future__ import annotations

from collections.abc import Iterator
from math import floor

from runspec.estimate.price import hourly_price
from runspec.estimate.speed import step_seconds
from runspec.lint.registry import Context, Violation, rule


@rule("no-budget", "placement")
def no_budget(context: Context) -> Iterator[Violation]:
    """Hardware that is paid by the hour must have a budget.

        budget.max_hours or budget.max_cost, where some price_per_hour > 0

    A run that stalls over a weekend costs as much as one that learns. When the budget is spent the
    run stops, and can be resumed.
    """
    spec = context.spec
    price = hourly_price(spec) or 0.0
    if price > 0.0 and spec.budget.max_hours is None and spec.budget.max_cost is None:
        yield Violation(
            ("budget",),
            f"the hardware costs {price:g} an hour, and nothing ends that",
            numbers={"price_per_hour": price},
            suggestion=f"max_cost: {price * 24:g} is a day",
        )


@rule("over-budget", "placement")
def over_budget(context: Context) -> Iterator[Violation]:
    """The money must last to the last step.

        steps x step_s / 3600 x price_per_hour <= max_cost

    step_s is the time of a step with every role always at work (`runspec.estimate.speed`), from
    measured speeds where the spec has them: `runspec plan` forecasts more. A run that its budget
    ends early is resumable, but the steps that were planned were never paid for. Silent where a
    speed is not known.
    """
    spec = context.spec
    step_s, price = step_seconds(spec, context.config), hourly_price(spec)
    if step_s is None or price is None or spec.budget.max_cost is None:
        return
    cost = spec.steps * step_s / 3600.0 * price
    if cost > spec.budget.max_cost:
        affordable = spec.budget.max_cost / cost * spec.steps
        yield Violation(
            ("budget", "max_cost"),
            f"{spec.budget.max_cost:g}, but {spec.steps} steps cost {cost:.0f} by the estimate",
            numbers={
                "steps": spec.steps,
                "step_s": float(f"{step_s:.4g}"),
                "price_per_hour": price,
                "cost": round(cost, 2),
                "max_cost": spec.budget.max_cost,
            },
            suggestion=f"it pays {floor(affordable)} steps",
        )


@rule("short-budget", "placement", severity="warning")
def short_budget(context: Context) -> Iterator[Violation]:
    """The hours of the budget should last to the last step.

        steps x step_s / 3600 <= max_hours

    step_s is that of `over-budget`: no run is faster, and `runspec plan` forecasts how much slower
    this one is. A run whose hours are over stops, and can be resumed with more. Silent where a
    speed is not known.
    """
    spec, allowed = context.spec, context.spec.budget.max_hours
    step_s = step_seconds(spec, context.config) if allowed is not None else None
    if allowed is None or step_s is None:
        return
    hours = spec.steps * step_s / 3600.0
    if hours > allowed:
        yield Violation(
            ("budget", "max_hours"),
            f"{allowed:g}, but {spec.steps} steps need {hours:.4g} hours at least",
            numbers={
                "steps": spec.steps,
                "step_s": float(f"{step_s:.4g}"),
                "needed": float(f"{hours:.4g}"),
                "max_hours": allowed,
            },
            suggestion=f"it lasts for {floor(allowed / hours * spec.steps)} steps",
        )
