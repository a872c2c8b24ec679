"""Advantages: the three formulas, and no group of one."""

from __future__ import annotations

import statistics
from typing import Literal

import numpy as np
import pytest

from learner_jax.advantage import group_advantages

TASK = [1.0, 0.0, 0.0, 1.0]
PENALTY = [-0.2, -0.1, 0.0, -0.4]
REWARD = [0.8, -0.1, 0.0, 0.6]


def advantages(
    normalize: Literal["std", "task", "none"],
    task: list[float] = TASK,
    penalty: list[float] = PENALTY,
    reward: list[float] = REWARD,
) -> list[float]:
    arrays = (np.array(x) for x in (task, penalty, reward))
    return group_advantages(*arrays, normalize=normalize).tolist()


def test_none_is_the_distance_from_the_mean() -> None:
    mean = statistics.fmean(REWARD)
    assert advantages("none") == pytest.approx([r - mean for r in REWARD])


def test_std_divides_by_the_standard_deviation_of_a_sample() -> None:
    mean, std = statistics.fmean(REWARD), statistics.stdev(REWARD)  # ddof 1
    assert advantages("std") == pytest.approx([(r - mean) / (std + 1e-6) for r in REWARD])


def test_task_normalises_the_task_alone() -> None:
    std = statistics.stdev(TASK)
    centre = statistics.fmean(PENALTY)
    expected = [(t - 0.5) / (std + 1e-6) + p - centre for t, p in zip(TASK, PENALTY, strict=True)]
    assert advantages("task") == pytest.approx(expected)


def test_length_noise_becomes_no_unit_advantage_under_task() -> None:
    # given a group whose task rewards are equal, and lengths off by a hair
    penalty = [-0.001, -0.002, -0.001, -0.003]
    group = {"task": [1.0] * 4, "penalty": penalty, "reward": [1.0 + p for p in penalty]}
    # then `std` blows the hair up, `task` and `none` do not
    assert max(map(abs, advantages("std", **group))) > 1
    assert max(map(abs, advantages("task", **group))) < 0.002
    assert max(map(abs, advantages("none", **group))) < 0.002


@pytest.mark.parametrize("normalize", ["std", "task", "none"])
def test_equal_rewards_have_no_advantage(normalize: Literal["std", "task", "none"]) -> None:
    assert advantages(normalize, [1.0] * 3, [0.0] * 3, [1.0] * 3) == [0.0] * 3


def test_groups_are_independent() -> None:
    # given two groups at once
    stacked = [np.array([x, x[::-1]]) for x in (TASK, PENALTY, REWARD)]
    found = group_advantages(*stacked, normalize="std")
    # then each has the advantages that it has alone
    np.testing.assert_allclose(found[0], advantages("std"))
    np.testing.assert_allclose(found[1], found[0][::-1])


@pytest.mark.parametrize("normalize", ["std", "task", "none"])
def test_a_group_of_one_is_refused(normalize: Literal["std", "task", "none"]) -> None:
    with pytest.raises(ValueError, match="at least two"):
        advantages(normalize, [1.0], [0.0], [1.0])


def test_task_needs_rewards_that_are_a_sum() -> None:
    # given `max` rewards: task times a factor of the length
    with pytest.raises(ValueError, match="task reward"):
        advantages("task", reward=[0.5, 0.0, 0.0, 0.7])


def test_rewards_that_verdict_files_round_are_still_a_sum() -> None:
    """R, T and P are float32 there, each rounded by itself: in the hundreds by more than 1e-5."""
    task = np.array([0.3, 0.05, 1.0, 0.0])  # partial credit
    penalty = -0.02 * np.array([15_999.0, 9_001.0, 40.0, 15_000.0])  # off by thousands of tokens
    rounded = (np.float32(x) for x in (task, penalty, task + penalty))
    exact = group_advantages(task, penalty, task + penalty, normalize="task")
    np.testing.assert_allclose(group_advantages(*rounded, normalize="task"), exact, atol=1e-4)
    with pytest.raises(ValueError, match="task reward"):
        group_advantages(task, penalty, task + penalty + 1e-3, normalize="task")
