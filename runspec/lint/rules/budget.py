"""Money, and the hours that it buys."""

from __future__ import annotations

from collections.abc import Iterator
from math import floor

from runspec.estimate.price import hourly_price
from runspec.estimate.run import forecast
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
    """The budget must last to the last step.

        (start_s + (steps - 1) x step_s) / 3600 <= max_hours
        (start_s + (steps - 1) x step_s) / 3600 x price_per_hour <= max_cost

    start_s (to the first trained step) and step_s are the forecast of `runspec plan`, from measured
    speeds where the spec has them. A run that its budget ends early is resumable, but ends before
    its last step. Silent where a speed is not known.
    """
    spec, budget = context.spec, context.spec.budget
    prices = {"max_hours": 1.0, "max_cost": hourly_price(spec)}
    limits = {name: getattr(budget, name) for name in prices if prices[name]}
    limits = {name: allowed for name, allowed in limits.items() if allowed is not None}
    times = forecast(spec, context.config) if limits else None
    if times is None:
        return
    start_s, step_s = times
    for name, allowed in limits.items():
        price_per_s = (prices[name] or 0.0) / 3600.0
        needed = (start_s + (spec.steps - 1) * step_s) * price_per_s
        if needed > allowed:
            lasts = floor(max(0.0, allowed / price_per_s - start_s + step_s) / step_s)
            yield Violation(
                ("budget", name),
                f"{allowed:g}, but {spec.steps} steps need {needed:.4g} by the forecast",
                numbers={
                    "steps": spec.steps,
                    "start_s": float(f"{start_s:.4g}"),
                    "step_s": float(f"{step_s:.4g}"),
                    "needed": float(f"{needed:.4g}"),
                    name: allowed,
                },
                suggestion=f"it lasts for {lasts} steps",
            )
