"""Money."""

from __future__ import annotations

from collections.abc import Iterator

from runspec.estimate.price import hourly_price
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
            requires="max_hours or max_cost is given, or price_per_hour = 0",
            suggestion=f"max_cost: {price * 24:g} is a day",
        )
