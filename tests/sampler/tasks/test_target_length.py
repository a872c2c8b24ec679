"""The three forms of the length term against numbers worked out by hand."""

from __future__ import annotations

import pytest

from runspec.core.errors import UserError
from runspec.core.spec.schema import Reward
from sampler.tasks.rewards.target_length import TargetLengthReward


@pytest.mark.parametrize(
    ("form", "alpha", "task", "target", "length", "reward"),
    [
        ("exact", 0.05, 1.0, 16, 16, 1.0),
        ("exact", 0.05, 1.0, 16, 10, 0.7),
        ("exact", 0.05, 0.0, 16, 20, -0.2),
        ("exact", 3e-4, 1.0, 2000, 3000, 0.7),
        ("max", 0.05, 1.0, 16, 16, 0.5),
        ("max", 0.05, 1.0, 16, 12, 0.7),
        ("max", 0.05, 1.0, 16, 22, 0.2),
        ("max", 0.05, 1.0, 16, 1, 1.0),
        ("max", 0.05, 1.0, 16, 40, 0.0),
        ("max", 0.05, 0.0, 16, 16, 0.0),
        ("clip", None, 1.0, 16, 16, 1.0),
        ("clip", None, 1.0, 16, 17, 0.0),
        ("clip", None, 0.0, 16, 3, 0.0),
    ],
)
def test_reward_is_task_reward_plus_penalty(
    form: str, alpha: float | None, task: float, target: int, length: int, reward: float
) -> None:
    settings = {"name": "length", "kind": "target_length", "form": form, "alpha": alpha}
    term = TargetLengthReward(Reward.model_validate(settings))
    assert task + term.penalty(task, target, length) == pytest.approx(reward, abs=1e-12)


@pytest.mark.parametrize("settings", [{}, {"form": "exact"}, {"form": "max"}, {"alpha": 0.1}])
def test_a_term_without_form_or_alpha_is_refused(settings: dict[str, object]) -> None:
    reward = Reward.model_validate({"name": "length", "kind": "target_length", **settings})
    with pytest.raises(UserError, match="needs form and alpha"):
        TargetLengthReward(reward)
