"""Budgets of time and of money, and what hardware costs an hour."""

from __future__ import annotations

from runspec.core.spec.schema import Budget, RunSpec
from runspec.estimate.price import hourly_price
from runspec.local.budget import Limit, left_s, limits
from tests.runspec.local.fake_run import small_spec


def priced(*overrides: str, hours: float | None = None, money: float | None = None) -> RunSpec:
    """A learner of 2 devices at 4, two workers of one device at 0.5, and what `overrides` say."""
    spec = small_spec(
        "small",
        5,
        "learner.hardware={kind: cpu, count: 2, price_per_hour: 4}",
        "samplers.volunteers={hardware: {kind: cpu, price_per_hour: 0.5}, replicas: 2}",
        *overrides,
    )
    return spec.model_copy(update={"budget": Budget(max_hours=hours, max_cost=money)})


def test_an_hour_costs_what_its_devices_cost() -> None:
    assert hourly_price(priced()) == 2 * 4 + 2 * 0.5
    validators = (
        "verify.hardware={kind: l4, count: 2, price_per_hour: 0.25}",
        "verify.validators=3",
    )
    assert hourly_price(priced(*validators)) == 9 + 3 * 2 * 0.25
    assert hourly_price(small_spec()) is None, "nothing has a price"


def test_the_first_limit_ends_the_run() -> None:
    # given 9 an hour, then 18 are two hours
    money = priced(money=18.0)
    assert limits(money) == [Limit("budget.max_cost", 2.0)]
    assert left_s(money, 3600.0) == 3600.0
    assert left_s(money, 3 * 3600.0) == -3600.0
    # whichever comes first
    both = priced(money=18.0, hours=1.0)
    assert [limit.path for limit in limits(both)] == ["budget.max_hours", "budget.max_cost"]
    assert left_s(both, 0.0) == 3600.0
