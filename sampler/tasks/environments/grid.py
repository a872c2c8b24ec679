"""Walk a grid to its goal around walls that the seed drew; each step is a word."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from sampler.tasks.environment import Environment, Message
from verify.plugins import Problem

MOVES = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}


class Grid(Environment):
    """`verification_info` may name `size` (5, of 2 to 16) and `walls` (4, never on a shortest way
    along the edge). The reward is 1 at the goal, else the share of the distance that is gone."""

    max_turns, max_tokens_per_turn, max_observation_tokens = 32, 64, 512

    def start(self, problem: Problem, seed: int) -> tuple[Any, list[Message]]:
        size = min(16, max(2, int(problem.verification.get("size", 5))))
        inner = [(row, column) for row in range(1, size) for column in range(size - 1)]
        count = min(len(inner), int(problem.verification.get("walls", 4)))
        walls = random.Random(seed).sample(inner, count)
        state = {"size": size, "at": [0, 0], "walls": sorted(map(list, walls))}
        words = f"{problem.prompt}\nSay up, down, left or right.\n{drawn(state)}"
        return state, [Message(role="user", content=words)]

    def step(
        self, problem: Problem, state: Any, message: str
    ) -> tuple[Any, Sequence[Message], bool]:
        words = message.lower().split()
        move = MOVES.get(words[-1].strip(".!")) if words else None
        if move is None:
            return state, [Message(role="user", content="say one of: " + ", ".join(MOVES))], False
        row, column = state["at"][0] + move[0], state["at"][1] + move[1]
        inside = 0 <= row < state["size"] and 0 <= column < state["size"]
        if not inside or [row, column] in state["walls"]:
            return state, [Message(role="user", content="blocked\n" + drawn(state))], False
        state = {**state, "at": [row, column]}
        over = row == column == state["size"] - 1
        return state, [] if over else [Message(role="user", content=drawn(state))], over

    def grade(self, problem: Problem, state: Any, transcript: Sequence[Message]) -> float:
        far = 2 * (state["size"] - 1)
        return sum(state["at"]) / far

    def example(self, problem: Problem) -> list[str]:
        size = min(16, max(2, int(problem.verification.get("size", 5))))
        return ["right"] * (size - 1) + ["down"] * (size - 1)


def drawn(state: Any) -> str:
    """Return the grid as lines: `@` the walker, `G` the goal, `#` a wall."""
    rows = [["."] * state["size"] for _ in range(state["size"])]
    rows[-1][-1] = "G"
    for row, column in state["walls"]:
        rows[row][column] = "#"
    rows[state["at"][0]][state["at"][1]] = "@"
    return "\n".join("".join(row) for row in rows)
