"""Rollouts laid out for a prefill: each prompt computed once, however many outputs continue it.

A part is what a device computes at once: at most so many positions, each of which stands in the
packed rows (`attention.rows`) of every rollout that it belongs to. The last token of an output is
the input of nothing, and has no position.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

import jax
import numpy as np

from learner_jax.attention import Rows
from learner_jax.packing import Data
from verify.plugins import PrefillInput, by_prompt, require_fits

MOST_REPEATS = 4
"""Rows of a part, at most, of those that its positions would fill if each stood in one."""


@dataclass(frozen=True)
class Shape:
    """Shape of a part. There are few shapes, since each is compiled."""

    positions: int
    """U, of full parts a multiple of `tokens`; also the most output tokens."""
    rows: int
    """R."""
    tokens: int
    """T, of a row."""


@dataclass(frozen=True)
class Place:
    """Where a rollout is in its part."""

    member: int
    """Number of the rollout."""
    prompt: int
    """The first position of its prompt."""
    first: bool
    """Whether no rollout before it in the part has that prompt."""
    output: int
    """The first position of its output, all but the last token."""
    row: int
    column: int
    """Where its prompt begins in the rows."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PrefillBatch:
    """A part for each of B shards, int32."""

    tokens: Data
    """[B, U]."""
    positions: Data
    """[B, U]: of each token in its rollout, from 0."""
    segment_ids: Data
    """[B R, T]: 1, 2, ... for the rollouts of a row, 0 for padding."""
    rows: Rows


def shape_for(inputs: Sequence[PrefillInput], *, tokens: int, rows: int) -> Shape:
    """The shape of full parts: as many rows as the prompts of these rollouts are shared.

    Args:
        inputs: at least one.
        tokens: length of a row.
        rows: that the positions of a part would fill if each stood in one.

    Raises:
        UserError: a rollout is longer than a row.
        ValueError: a rollout without prompt or output.
    """
    if not all(len(each.prompt_tokens) and len(each.output_tokens) for each in inputs):
        raise ValueError("a rollout needs a prompt token and an output token")
    require_fits(inputs, tokens)
    prompts = sum(len(inputs[members[0]].prompt_tokens) for members in by_prompt(inputs))
    outputs = sum(len(each.output_tokens) - 1 for each in inputs)
    laid_out = sum(len(each.prompt_tokens) for each in inputs) + outputs
    # In halves, and a quarter of the rows may be missing: a part that runs out of rows ends there.
    shared = laid_out / (prompts + outputs)
    halves = min(2 * MOST_REPEATS, max(2, ceil(2 * shared - 0.5)))
    return Shape(rows * tokens, -(-halves * rows // 2), tokens)


def divide(inputs: Sequence[PrefillInput], shape: Shape) -> list[list[Place]]:
    """Every rollout in one part, those of a prompt one after the other, the longest first.

    Args:
        inputs: the rollouts.
        shape: of `shape_for` the same.
    """
    parts: list[list[Place]] = []
    room: list[int] = []  # of each row of the part
    used = predicted = 0
    for members in _longest_first(inputs):
        length, prompt = len(inputs[members[0]].prompt_tokens), -1
        for member in members:
            count = len(inputs[member].output_tokens)
            size = length + count - 1
            row = next((n for n, left in enumerate(room) if left >= size), len(room))
            new = count - 1 + (length if prompt < 0 else 0)
            full = used + new > shape.positions or predicted + count > shape.positions
            if not parts or full or row >= shape.rows:
                parts.append([])
                room, used, predicted, prompt, row = [], 0, 0, -1, 0
            if row == len(room):
                room.append(shape.tokens)
            first = prompt < 0
            if first:
                prompt, used = used, used + length
            parts[-1].append(Place(member, prompt, first, used, row, shape.tokens - room[row]))
            used, predicted = used + count - 1, predicted + count
            room[row] -= size
    return parts


def lay_out(
    parts: Sequence[Sequence[Place]], inputs: Sequence[PrefillInput], shape: Shape, shards: int
) -> PrefillBatch:
    """The arrays of at most `shards` parts; the shards that get none are padding."""
    tokens, positions, places = np.zeros((3, shards, shape.positions), np.int32)
    laid = np.zeros((2, shards, shape.rows, shape.tokens), np.int32)
    for shard, part in enumerate(parts):
        sources, segment_ids = laid[:, shard]
        for number, place in enumerate(part, start=1):
            each = inputs[place.member]
            length, count = len(each.prompt_tokens), len(each.output_tokens) - 1
            at = place.row * shape.tokens + place.column
            own = slice(place.output, place.output + count)
            tokens[shard, own] = each.output_tokens[:-1]
            positions[shard, own] = np.arange(length, length + count)
            places[shard, own] = np.arange(at + length, at + length + count)
            prompt = slice(place.prompt, place.prompt + length)
            if place.first:
                tokens[shard, prompt] = each.prompt_tokens
                positions[shard, prompt] = np.arange(length)
                places[shard, prompt] = np.arange(at, at + length)
            middle, end = place.column + length, place.column + length + count
            sources[place.row, place.column : middle] = np.arange(prompt.start, prompt.stop)
            sources[place.row, middle:end] = np.arange(own.start, own.stop)
            segment_ids[place.row, place.column : end] = number
    sources, segment_ids = laid.reshape(2, -1, shape.tokens)
    return PrefillBatch(tokens, positions, segment_ids, Rows(sources, places))


def predicting(place: Place, rollout: PrefillInput) -> np.ndarray:
    """i32 [n]: the positions that predict the output tokens, the prompt's last and the output's."""
    at = np.arange(place.output - 1, place.output + len(rollout.output_tokens) - 1, dtype=np.int32)
    at[0] = place.prompt + len(rollout.prompt_tokens) - 1
    return at


def halved(shape: Shape, parts: Sequence[Sequence[Place]], inputs: Sequence[PrefillInput]) -> Shape:
    """Half of the shape where that is enough for these parts, so that less is padding."""
    half = Shape(shape.positions // 2, -(-shape.rows // 2), shape.tokens)
    for part in parts:
        counts = [len(inputs[place.member].output_tokens) for place in part]
        used = max(place.output + n - 1 for place, n in zip(part, counts, strict=True))
        rows = max(place.row for place in part) + 1
        if max(used, sum(counts)) > half.positions or rows > half.rows:
            return shape
    return half


def _longest_first(inputs: Sequence[PrefillInput]) -> list[list[int]]:
    """The rollouts of each prompt, the longest first; so the prompts."""

    def length(member: int) -> int:
        return len(inputs[member].prompt_tokens) + len(inputs[member].output_tokens)

    groups = [sorted(members, key=length, reverse=True) for members in by_prompt(inputs)]
    return sorted(groups, key=lambda members: length(members[0]), reverse=True)
