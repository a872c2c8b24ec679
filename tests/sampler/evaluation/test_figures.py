"""Figures of evaluations against brute force, and intervals against simulated suites."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from sampler.evaluation.figures import figures, interval, majority, pass_at_k
from verify.formats.evaluation import ProblemResult

SUITES = 1000


@pytest.mark.parametrize("solved", range(7))
@pytest.mark.parametrize("k", [1, 2, 4, 6])
def test_pass_at_k_is_the_share_of_all_subsets_with_a_solution(solved: int, k: int) -> None:
    answers = [True] * solved + [False] * (6 - solved)
    subsets = list(combinations(answers, k))
    share = sum(any(subset) for subset in subsets) / len(subsets)
    assert pass_at_k(6, solved, k) == pytest.approx(share, abs=1e-12)


def suites(problems: int, samples: int, a: float, b: float) -> tuple[np.ndarray, float]:
    """Simulated mean rewards [SUITES, problems] of problems whose solve rates are Beta(a, b)."""
    rng = np.random.default_rng(problems * samples)
    rates = rng.beta(a, b, (SUITES, problems))
    return rng.binomial(samples, rates) / samples, a / (a + b)


def coverage(problems: int, samples: int, a: float, b: float) -> float:
    values, truth = suites(problems, samples, a, b)
    found = [interval(suite) for suite in values]
    return sum(low <= truth <= high for low, high in found) / SUITES


@pytest.mark.slow
@pytest.mark.parametrize(
    ("problems", "samples", "a", "b"),
    [(100, 1, 1.0, 1.0), (100, 4, 0.4, 0.6), (150, 8, 2.0, 5.0), (300, 2, 0.3, 2.0)],
)
def test_intervals_of_many_problems_cover_the_truth_in_95_percent(
    problems: int, samples: int, a: float, b: float
) -> None:
    assert 0.93 <= coverage(problems, samples, a, b) <= 0.97


@pytest.mark.parametrize(
    ("problems", "samples", "a", "b"),
    [(5, 4, 1.0, 1.0), (12, 1, 0.5, 0.5), (30, 4, 0.2, 3.0), (30, 1, 10.0, 0.5), (64, 4, 2.0, 2.0)],
)
def test_intervals_of_few_problems_cover_the_truth_at_least_so_often(
    problems: int, samples: int, a: float, b: float
) -> None:
    assert coverage(problems, samples, a, b) >= 0.93


def test_lengths_of_few_problems_too() -> None:
    rng = np.random.default_rng(0)
    lengths = rng.gamma(4.0, 100.0, (SUITES, 40))
    found = [interval(suite) for suite in lengths]
    assert sum(low <= 400.0 <= high for low, high in found) >= 0.93 * SUITES


def test_where_all_problems_are_solved_the_interval_still_has_a_width() -> None:
    low, high = interval(np.ones(200))
    assert low < 1.0 and high == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("answers", "rewards", "expected"),
    [
        (["4", " 4 ", "5"], [1.0, 1.0, 0.0], 1.0),
        (["4", "5", "5"], [1.0, 0.0, 0.0], 0.0),
        (["4", "5"], [1.0, 0.0], 0.5),
        ([None, None, "4"], [0.0, 0.0, 1.0], 1.0),
        ([None, None], [0.0, 0.0], 0.0),
        (["4", "5"], [None, 0.0], 0.0),
        (["4"], [None], None),
    ],
)
def test_majority_is_the_reward_of_the_most_frequent_answer(
    answers: list[str | None], rewards: list[float | None], expected: float | None
) -> None:
    assert majority(answers, rewards) == expected


def test_figures_are_means_over_problems() -> None:
    problems = [
        ProblemResult("a", 10, [1.0, 0.0, None], [9, 12, 3], 0.5),
        ProblemResult("b", 20, [1.0, 1.0, 1.0], [20, 20, 20], 1.0),
    ]
    found = figures(problems)
    assert {name: figure.value for name, figure in found.items()} == {
        "mean": 0.75,
        "pass-2": 1.0,
        "majority": 0.75,
        "length": 14.0,
        "length-error": pytest.approx((1 + 2 + 7) / 6),
    }
    assert found["mean"].low is not None and found["mean"].low < 0.75
