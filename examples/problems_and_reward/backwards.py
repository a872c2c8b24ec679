"""Reward for words that are to be written backwards."""

from __future__ import annotations

from runspec.core.schema.training import Reward
from sampler.tasks.interfaces import Score
from verify.plugins import Problem


class Backwards:
    """Share of the letters that stand where they belong; 0 for an answer of another length."""

    role = "task"

    def __init__(self, reward: Reward) -> None:
        pass

    def score(self, problem: Problem, answer: str) -> Score:
        """Grade an answer. What an answer may cause is no exception here, but a reward of 0."""
        truth, said = problem.verification["answer"], answer.strip()
        if len(said) != len(truth):
            return Score(0.0, f"{len(said)} letters, where {len(truth)} are wanted")
        right = sum(a == b for a, b in zip(truth, said, strict=True))
        return Score(right / len(truth), f"{right} of {len(truth)} letters")
