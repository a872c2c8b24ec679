"""The mean of honest gaps: from groups, with room for what they do not show."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from verify.calibration.derive import ROOM, noise_of

TAU, LEAST = 0.1, 1e-6


def rounding(
    rollouts: int, *, tokens: int = 300, share: float = 0.004, seed: int = 0
) -> list[np.ndarray]:
    """Gaps as bfloat16 has them: few, and most of them small."""
    rng = np.random.default_rng(seed)
    return [
        (rng.exponential(0.015, tokens) * (rng.random(tokens) < share)).astype(np.float32)
        for _ in range(rollouts)
    ]


def noise_in(gaps: list[np.ndarray]) -> float:
    return noise_of(gaps, tau=TAU, least=LEAST, probability=1e-6).mean / ROOM


def test_the_mean_is_that_of_gaps_up_to_where_most_of_them_end() -> None:
    gaps = rounding(2000)
    found = noise_of(gaps, tau=TAU, least=LEAST, probability=1e-6)
    together = np.concatenate(gaps)
    above = together[together > 0]
    assert found.cap == pytest.approx(np.quantile(above, 0.9), rel=0.01)
    # of so many tokens little is not known
    assert found.mean / ROOM == pytest.approx(np.minimum(together, found.cap).mean(), rel=0.5)
    assert found.probability == 1e-6


@pytest.mark.parametrize("seed", range(5))
def test_few_groups_give_a_mean_hardly_below_the_true_one(seed: int) -> None:
    true = 0.004 * 0.015
    assert noise_in(rounding(40, seed=seed)) > 0.9 * true


def test_groups_that_differ_count_as_groups_and_not_as_tokens() -> None:
    # given the same gaps, spread over all groups or all in every twentieth
    even = rounding(400)
    uneven = [each * (number % 20 == 0) for number, each in enumerate(rounding(400, share=0.08))]
    assert noise_in(uneven) > 1.2 * noise_in(even)


def test_every_group_that_was_measured_keeps_its_budget() -> None:
    # given prompts of which few have ten times the gaps of the others, in long outputs
    calm = rounding(400, tokens=2000)
    hard = rounding(8, tokens=20_000, share=0.04, seed=1)
    found = noise_of(calm + hard, tau=TAU, least=LEAST, probability=1e-6)
    # then none of them is rejected by itself, as one would be by the mean of all
    means = [found.counted(each) / len(each) for each in hard]
    assert max(means) <= found.largest_mean(20_000)
    sums = sum(found.counted(each) for each in calm + hard)
    tokens = sum(map(len, calm + hard))
    assert max(means) > replace(found, mean=ROOM * sums / tokens).largest_mean(20_000)
