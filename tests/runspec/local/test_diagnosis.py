"""Why a run does not learn: each cause is made to happen in the figures of a run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from runspec.core.spec.schema import RunSpec
from runspec.local.diagnosis import NEWEST, cause_lines, diagnose, is_learning
from tests.runspec.local.fake_run import small_spec

STEPS = 2 * NEWEST


def row(step: int, **figures: Any) -> dict[str, Any]:
    """A step of a run that stands still, for none of the reasons that are known."""
    usual = {
        "task_reward": 0.4 + 0.01 * (step % 3),
        "reward": 0.3 + 0.01 * (step % 3),
        "length_mean": 20.0,
        "entropy": 1.0,
        "clip_fraction_low": 0.01,
        "clip_fraction_high": 0.01,
        "clip_fraction_delta": 0.0,
        "policy_drift": 0.02,
        "lag_mean": 2.0,
        "filtered_groups": 0,
        "trained_rollouts": 128,
        "skipped_updates": 0,
    }
    return {"step": step, **usual, **figures}


def names(rows: list[dict[str, Any]], spec: RunSpec | None = None, failed: int = 0) -> list[str]:
    return [cause.name for cause in diagnose(spec or small_spec(), rows, failed)]


def test_a_run_that_stands_still_for_no_known_reason_has_no_diagnosis() -> None:
    assert names([row(step) for step in range(STEPS)]) == []


@pytest.mark.parametrize(
    ("figures", "expected"),
    [
        ({"task_reward": 0.0, "reward": 0.0}, ["NothingRight"]),
        ({"filtered_groups": 90, "trained_rollouts": 128}, ["EqualGroups"]),
        ({"length_mean": 47.0}, ["CutOff"]),
        ({"clip_fraction_high": 0.35}, ["RatioClipped"]),
        ({"policy_drift": 0.2}, ["LagAtLimit"]),
        ({"policy_drift": 0.2, "lag_mean": 1.0}, []),
        ({"reward": -0.2}, ["LengthOutweighs"]),
        ({"skipped_updates": 1}, ["UpdatesSkipped"]),
    ],
)
def test_each_cause_has_its_name(figures: dict[str, Any], expected: list[str]) -> None:
    assert names([row(step, **figures) for step in range(STEPS)]) == expected


def test_entropy_has_collapsed_if_it_was_there_once() -> None:
    def falling(step: int) -> dict[str, Any]:
        return row(step, entropy=1.0 if step < NEWEST else 0.01)

    assert names([falling(step) for step in range(STEPS)]) == ["EntropyCollapsed"]
    assert names([row(step, entropy=0.01) for step in range(STEPS)]) == []


def test_a_grader_that_fails_comes_first() -> None:
    rows = [row(step, task_reward=0.0, reward=0.0) for step in range(STEPS)]
    groups = STEPS * small_spec().grpo.prompts_per_step
    assert names(rows, failed=groups) == ["GraderFails", "NothingRight"]
    assert names(rows, failed=groups // 100) == ["NothingRight"]


@pytest.mark.parametrize(
    ("reward", "learning"),
    [
        (lambda step: 0.2 + 0.01 * step, True),
        (lambda step: 0.6 - 0.01 * step, False),
        (lambda step: 0.4 + 0.05 * (step % 2), False),
        (lambda step: 0.97, True),
    ],
)
def test_a_run_that_rises_or_has_all_is_not_asked_why(
    reward: Callable[[int], float], learning: bool
) -> None:
    rows = [row(s, task_reward=reward(s), reward=0.0, skipped_updates=1) for s in range(STEPS)]
    assert is_learning(rows) == learning
    assert (names(rows) == []) == learning


def test_little_is_said_too_early_and_nothing_of_documents() -> None:
    rows = [row(step, skipped_updates=1) for step in range(NEWEST)]
    assert names(rows) == ["UpdatesSkipped"]
    assert names(rows[1:]) == []


def test_lines_name_numbers_and_fields() -> None:
    rows = [row(step, length_mean=47.5) for step in range(STEPS)]
    causes = diagnose(small_spec(), rows)
    assert list(cause_lines(causes)) == [
        "CutOff: the mean output has 47.5 tokens, and 48 are the most "
        "(look at samplers.volunteers.max_new_tokens)"
    ]
