"""What a package may leave out of its reward, and what is then taken."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from runspec.core.spec.schema import Reward
from sampler.grading.answers import Answer, TermRules
from sampler.grading.graders import Graders
from sampler.tasks.interfaces import Score
from tests.sampler.grading.plugin import install
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
