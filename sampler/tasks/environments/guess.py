"""Guess a number from 1 to N in few turns: the smallest environment there is."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from sampler.tasks.environment import Environment, Message
from verify.plugins import Problem


class Guess(Environment):
    """The number follows from the group's seed; `verification_info` may name `most` (N, 100)."""

    max_turns, max_tokens_per_turn, max_observation_tokens = 8, 32, 16

    def start(self, problem: Problem, seed: int) -> tuple[Any, list[Message]]:
        most = int(problem.verification.get("most", 100))
        words = f"{problem.prompt}\nGuess a number from 1 to {most}."
        return {"secret": seed % most + 1, "right": False}, [Message(role="user", content=words)]

    def step(
        self, problem: Problem, state: Any, message: str
    ) -> tuple[Any, Sequence[Message], bool]:
        found = re.search(r"\d{1,9}", message)
        guess = int(found[0]) if found else 0
        if guess == state["secret"]:
            return {**state, "right": True}, [], True
        hint = "too low" if guess < state["secret"] else "too high"
        return state, [Message(role="user", content=hint)], False

    def grade(self, problem: Problem, state: Any, transcript: Sequence[Message]) -> float:
        return float(state["right"])
