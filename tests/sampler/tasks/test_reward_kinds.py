"""What a package may leave out of its reward, and what is then taken."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from runspec.core.errors import UserError
from runspec.core.spec.schema import Reward
from sampler.tasks.grading.answers import Answer, TermRules
from sampler.tasks.grading.graders import Graders
from sampler.tasks.interfaces import Score
from sampler.tasks.rewards.target_length import TargetLengthReward
from tests.sampler.tasks.grading.plugin import install
from verify.plugins import Problem

PACKAGE = """\
from sampler.tasks.interfaces import Score, TaskTerm

class Bare:
    role = "task"

    def __init__(self, reward):
        self.score = lambda problem, answer: float(answer)

class Derived(TaskTerm):
    limits_blame_answer = True
    timeout_s = 3.0

    def prepare(self):
        self.factor = 0.5

    def score(self, problem, answer):
        return Score(self.factor * float(answer), "half")
"""


@pytest.mark.slow
def test_a_package_may_derive_from_the_interface_or_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a package with a reward of either sort
    entry_points = "[runspec.rewards]\nbare = chess_kinds:Bare\nderived = chess_kinds:Derived\n"
    install(tmp_path, monkeypatch, "chess_kinds", entry_points, PACKAGE)
    rewards = [Reward.model_validate({"name": k, "kind": k}) for k in ("bare", "derived")]
    asked = [Answer(Problem("p", kind, "", {}), "1") for kind in ("bare", "derived")]
    # When grader processes grade by both
    with closing(Graders(rewards, processes=1)) as graders:
        results = graders.score(asked)
        rules = dict(graders.rules)
    # Then each is graded by its own rules
    assert results == [Score(1.0), Score(0.5, "half")]
    assert rules == {
        "bare": TermRules(timeout_s=10.0, repeatable=True, limits_blame_answer=False),
        "derived": TermRules(timeout_s=3.0, repeatable=True, limits_blame_answer=True),
    }


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
