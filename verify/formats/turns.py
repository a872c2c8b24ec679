"""A rollout of several turns as one sequence: the model's tokens, and those between its turns.

A submission carries the model's tokens alone, and the length of each turn. A validator replays the
environment and writes what stands between the turns (end of turn, role header, observation,
generation prompt) into its signed verdict. So a worker cannot forge an observation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest

import numpy as np


@dataclass(frozen=True)
class Joined:
    """What follows the prompt, with the positions that the model sampled."""

    tokens: np.ndarray
    """i32 [n]: turn, what stands after it, turn, ..., turn."""
    own: np.ndarray | None
    """bool [n]: True where the model sampled the token; None if it sampled all."""


def split_turns(output: np.ndarray, turns: Sequence[int] | np.ndarray | None) -> list[np.ndarray]:
    """Return the turns of a rollout, whose lengths add up to that of the output; None: one turn."""
    if turns is None:
        return [output]
    return np.split(output, np.cumsum(turns)[:-1])


def joined(
    output: np.ndarray,
    turns: Sequence[int] | np.ndarray | None,
    between: np.ndarray | None,
    between_lengths: Sequence[int] | np.ndarray | None,
) -> Joined:
    """Put the model's tokens and what stands between them into one sequence.

    Args:
        output: i32 [m], the model's tokens of all turns.
        turns: lengths of the k turns, which add up to m; None if the task has one turn.
        between: i32, the tokens between the turns, one gap after the other.
        between_lengths: lengths of the k - 1 gaps, which add up to that of `between`.

    Raises:
        ValueError: the lengths do not fit.
    """
    if turns is None and between is None and between_lengths is None:
        return Joined(output, None)
    if turns is None or between is None or between_lengths is None:
        raise ValueError("turns without what stands between them, or the other way round")
    fits = len(turns) == len(between_lengths) + 1 and np.sum(turns) == len(output)
    if not fits or np.sum(between_lengths) != len(between):
        raise ValueError(
            f"{len(turns)} turns of {int(np.sum(turns))} tokens and {len(between_lengths)} gaps of "
            f"{int(np.sum(between_lengths))}, for {len(output)} and {len(between)} tokens"
        )
    gaps = split_turns(between, between_lengths)
    pairs = zip_longest(split_turns(output, turns), gaps, fillvalue=between[:0])
    own = np.repeat(np.arange(2 * len(turns) - 1) % 2 == 0, _alternating(turns, between_lengths))
    return Joined(np.concatenate([*chain.from_iterable(pairs)]).astype(np.int32), own)


def _alternating(
    first: Sequence[int] | np.ndarray, second: Sequence[int] | np.ndarray
) -> list[int]:
    lengths = [0] * (len(first) + len(second))
    lengths[::2], lengths[1::2] = list(map(int, first)), list(map(int, second))
    return lengths


def gaps(between: Sequence[Sequence[int]] | None) -> tuple[np.ndarray | None, np.ndarray | None]:
    """Return tokens between turns as a verdict has them: i32 tokens, and i32 lengths."""
    if between is None:
        return None, None
    tokens = np.array([*chain.from_iterable(between)], np.int32)
    return tokens, np.array([len(gap) for gap in between], np.int32)


def turn_room(per_turn: int, tokens: int, sequence: int) -> int:
    """Return the most tokens of the next turn; the rollout ends where there is no room.

    Args:
        per_turn: the environment's limit of a turn.
        tokens: left of the pool's `max_new_tokens`, which counts the model's tokens alone.
        sequence: left of its `max_model_len`, which counts all.
    """
    return max(0, min(per_turn, tokens, sequence))
