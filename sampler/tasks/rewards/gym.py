"""reasoning-gym's own scorers, made binary."""

from __future__ import annotations

import math
from typing import ClassVar, Literal

from runspec.spec.schema import Reward
from verify.plugins import Problem


class GymReward:
    """The scorer of the problem's own generator, made binary: full credit or none.

    Partial credit would pay for guesses: a word that ends in the right letters, say.
    """

    role: ClassVar[Literal["task", "length"]] = "task"

    def __init__(self, reward: Reward) -> None:
        """There is nothing to set."""

    def score(self, problem: Problem, answer: str) -> float:
        """1.0 for the generator's full credit, else 0.0; what is not a number is passed on, for
        the caller to refuse.

        Full credit is exactly 1: scorers that add up shares reach 1.0000000000000002 for a long
        answer that only begins right.
        """
        score = float(problem.verification["score_answer"](answer, problem.verification["entry"]))
        return float(score == 1.0) if math.isfinite(score) else score
