"""The bound of a tail holds on fresh draws of known distributions, or there is none."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from verify.calibration.tails import (
    MIN_SAMPLES,
    samples_needed,
    tail_bound,
)

stats = pytest.importorskip("scipy.stats")
Draw = Callable[[np.random.Generator, int], np.ndarray]
CONTINUOUS: dict[str, tuple[Draw, Callable[[float], float]]] = {
    "half normal": (lambda g, n: np.abs(g.normal(size=n)), lambda x: 2 * stats.norm.sf(x)),
    "exponential": (lambda g, n: g.exponential(size=n), stats.expon.sf),
    "gamma": (lambda g, n: g.gamma(3.0, size=n), lambda x: stats.gamma.sf(x, 3.0)),
    "mostly zero": (
        lambda g, n: np.where(g.random(n) < 0.2, g.exponential(size=n), 0.0),
        lambda x: 0.2 * stats.expon.sf(x),
    ),
}
COUNTS: dict[str, tuple[Draw, Callable[[float], float]]] = {
    "binomial": (
        lambda g, n: g.binomial(128, 0.02, size=n),
        lambda x: stats.binom.sf(x, 128, 0.02),
    ),
    "geometric": (lambda g, n: g.geometric(0.4, size=n) - 1, lambda x: 0.6 ** (x + 1)),
    "rare": (lambda g, n: g.poisson(0.05, size=n), lambda x: stats.poisson.sf(x, 0.05)),
}
RATE = 1e-6


@pytest.mark.parametrize("name", [*CONTINUOUS, *COUNTS])
@pytest.mark.parametrize("n", [60, 1000])
def test_the_rate_holds_on_fresh_draws(name: str, n: int) -> None:
    # given many calibrations of a known distribution
    draw, above = (CONTINUOUS | COUNTS)[name]
    unit = 1.0 if name in COUNTS else None
    rng = np.random.default_rng(len(name))
    found = [tail_bound(draw(rng, n).astype(float), RATE, unit=unit) for _ in range(60)]
    bounds = [each.value for each in found if each.value is not None]
    assert len(bounds) > 40
    # then a fresh draw exceeds a bound no more often than was asked for, on average, and nearly
    # all of the bounds keep the rate by themselves
    rates = np.array([above(bound) for bound in bounds])
    assert rates.mean() <= RATE
    assert np.quantile(rates, 0.9) <= RATE
    # and they are no further out than twice where the rate is met
    met = np.max([x for x in np.linspace(0.0, 60.0, 6001) if above(x) >= RATE])
    assert np.median(bounds) < 2.2 * met + 3.0


@pytest.mark.parametrize("draw", [lambda g, n: g.pareto(1.0, n), lambda g, n: g.standard_cauchy(n)])
def test_heavy_tails_have_no_bound(draw: Draw) -> None:
    rng = np.random.default_rng(0)
    found = [tail_bound(np.abs(draw(rng, 2000)), RATE) for _ in range(20)]
    assert sum(each.value is None for each in found) > 15
    assert "heavier tail" in found[0].why


def test_too_few_samples_have_no_bound() -> None:
    values = np.random.default_rng(2).exponential(size=MIN_SAMPLES)
    assert tail_bound(values, RATE).value is not None
    found = tail_bound(values[1:], RATE)
    assert (found.value, found.why) == (None, f"{MIN_SAMPLES - 1} samples, {MIN_SAMPLES} needed")
    # and a rarer rate needs more of them
    assert samples_needed(1e-9) > 800
    assert tail_bound(values, 1e-9).value is None


def test_the_same_number_again_and_again_is_no_tail() -> None:
    # given mantissa errors of which one in 128 is the only one above 0
    values = np.repeat([0.0, 1 / 128], [470, 30])
    found = tail_bound(values, RATE)
    assert (found.value, found.why) == (None, "the 21 largest of 500 are all alike")
