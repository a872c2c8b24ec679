"""A prompt computed once for all samples that begin with it.

Everything but attention treats a position by itself. A part, what a device computes at once, has a
prompt's positions once, and then those of its outputs. For attention each position says what it
sees; or, for kernels that take no such mask, positions are laid out a second time, in packed rows
in which every sample stands whole (`attention.attend_shared`). The last token of an output is the
input of nothing, and has no position. In the layout of `packing.pack` every sample has a prompt of
its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

import numpy as np
from jax import tree
from jax.sharding import Mesh

from learner_jax.packing import (
    Packed,
    Placement,
    Rows,
    Sample,
    SharedPrompts,
    Spans,
    TokenBatch,
    pack,
    require_room,
)
from runspec.core.errors import UserError
from runspec.core.models.parameters import SHARING_NEEDS, can_share_prompts, sharing
from runspec.core.schema import RunSpec
from verify.plugins import by_prompt

MOST_REPEATS = 4
"""Rows of a part, at most, of those that its positions would fill if each stood in one."""


@dataclass(frozen=True)
class Shape:
    """Shape of a part. There are few shapes, since each is compiled."""

    positions: int
    """U, and the most targets."""
    rows: int = 0
    """R, for a kernel that takes rows (`packing.Rows`); 0 for one that takes `packing.Spans`."""
    tokens: int = 0
    """T, of a row."""


@dataclass(frozen=True)
class Place:
    """Where a sample is in its part."""

    member: int
    """Number of the sample."""
    prompt: int
    """The first position of its prompt."""
    first: bool
    """Whether no sample before it in the part has that prompt."""
    output: int
    """The first position of its output, all but the last token."""
    row: int
    column: int
    """Where its prompt begins in the rows."""
    target: int
    """Targets before its own."""


def shape_for(samples: Sequence[Sample], *, tokens: int, rows: int) -> Shape:
    """The shape of full parts: as many rows as the prompts of these samples are shared.

    Args:
        samples: at least one.
        tokens: length of a row.
        rows: that the positions of a part would fill if each stood in one.

    Raises:
        UserError: a sample is longer than a row.
    """
    require_room(samples, tokens)
    groups = by_prompt(each.prompt for each in samples)
    prompts = sum(len(samples[members[0]].prompt) for members in groups)
    outputs = sum(len(each.output) - 1 for each in samples)
    laid_out = sum(len(each.prompt) for each in samples) + outputs
    # In halves, and a quarter of the rows may be missing: a part that runs out of rows ends there.
    shared = laid_out / (prompts + outputs)
    halves = min(2 * MOST_REPEATS, max(2, ceil(2 * shared - 0.5)))
    return Shape(rows * tokens, -(-halves * rows // 2), tokens)


def shares_prompts(spec: RunSpec, mesh: Mesh) -> bool:
    """Whether a learner's programs take `pack_shared`, not `packing.pack`.

    Raises:
        UserError: `learner.packing.shared_prompts` is true, and cannot be.
    """
    cpu = mesh.devices.flat[0].platform == "cpu"
    if spec.learner.packing.shared_prompts and not can_share_prompts(spec, cpu=cpu):
        raise UserError(
            SHARING_NEEDS,
            place="learner.packing.shared_prompts",
            remedy="leave it out, or set learner.attention: xla",
        )
    return sharing(spec, cpu=cpu)


def pack_samples(samples: Sequence[Sample], spec: RunSpec, mesh: Mesh, microbatches: int) -> Packed:
    """Pack the samples of an optimizer batch as the learner's programs take them.

    Raises:
        UserError: a sample is longer than a row, or there are too many for the microbatches.
    """
    packing, shards = spec.learner.packing, mesh.shape["data"] * mesh.shape["fsdp"]
    sizes = {"tokens": packing.tokens, "rows": packing.rows, "shards": shards}
    how = pack_shared if shares_prompts(spec, mesh) else pack
    return how(samples, **sizes, microbatches=microbatches)


def pack_shared(
    samples: Sequence[Sample], *, tokens: int, rows: int, shards: int, microbatches: int
) -> Packed:
    """Pack samples into parts, one for each shard of each microbatch.

    No more microbatches are needed than `packing.row_bound` says of rows: a part that ends holds at
    least floor(positions / longest) samples.

    Args:
        samples: at least one.
        tokens: of a row, the most of a sample.
        rows: of a microbatch, which has the positions of so many, in `shards` equal parts.
        shards: devices that share a microbatch.
        microbatches: M, the rest padding.

    Raises:
        UserError: a sample is longer than a row, or there are too many for M microbatches.
    """
    lengths, shape = require_room(samples, tokens), Shape(rows * tokens // shards)
    parts = divide(samples, shape)
    needed = -(-len(parts) // shards)
    if needed > microbatches:
        raise UserError(
            f"{len(samples)} samples of up to {lengths.max()} tokens need {needed} microbatches "
            f"of {shards} x {shape.positions} positions, the spec's sizes allow for {microbatches}",
            place="learner.packing",
            remedy="the batch is larger or its rollouts are longer than the spec says: report this",
        )
    batch = lay_out(parts, samples, shape, microbatches * shards)
    where = {
        place.member: Placement(*divmod(part, shards), place.target, place.target + count, None)
        for part, places in enumerate(parts)
        for place in places
        for count in [samples[place.member].targets]
    }
    return Packed(
        tree.map(lambda x: x.reshape(microbatches, -1, x.shape[-1]), batch),
        needed,
        tuple(where[number] for number in range(len(samples))),
        sum(_used(part[-1], samples) for part in parts),
    )


def _used(last: Place, samples: Sequence[Sample]) -> int:
    """Positions of a part, by its last sample."""
    return last.output + len(samples[last.member].output) - 1


def divide(samples: Sequence[Sample], shape: Shape) -> list[list[Place]]:
    """Every sample in one part, those of a prompt one after the other, the longest first.

    Args:
        samples: none longer than a row.
        shape: of a part.
    """
    parts: list[list[Place]] = []
    room: list[int] = []  # of each row of the part
    used = predicted = 0
    groups = [
        sorted(members, key=lambda member: len(samples[member]), reverse=True)
        for members in by_prompt(each.prompt for each in samples)
    ]
    for members in sorted(groups, key=lambda members: len(samples[members[0]]), reverse=True):
        length, prompt = len(samples[members[0]].prompt), -1
        for member in members:
            count, targets = len(samples[member].output), samples[member].targets
            size = length + count - 1
            fits = (n for n, left in enumerate(room) if left >= size)
            row = next(fits, len(room)) if shape.rows else 0
            new = count - 1 + (length if prompt < 0 else 0)
            full = used + new > shape.positions or predicted + targets > shape.positions
            if not parts or full or row >= max(shape.rows, 1):
                parts.append([])
                room, used, predicted, prompt, row = [], 0, 0, -1, 0
            if row == len(room):
                room.append(shape.tokens)
            first = prompt < 0
            if first:
                prompt, used = used, used + length
            column = shape.tokens - room[row]
            parts[-1].append(Place(member, prompt, first, used, row, column, predicted))
            used, predicted = used + count - 1, predicted + targets
            room[row] -= size
    return parts


def lay_out(
    parts: Sequence[Sequence[Place]], samples: Sequence[Sample], shape: Shape, shards: int
) -> TokenBatch:
    """The arrays of at most `shards` parts; the shards that get none are padding.

    Returns:
        [shards, U] each, and rows [shards R, T].
    """
    tokens, positions, segments, predicts, places, begins, ends = np.zeros(
        (7, shards, shape.positions), np.int32
    )
    targets, starts = np.full_like(tokens, -1), np.full_like(tokens, shape.positions)
    laid = np.zeros((2, shards, shape.rows, shape.tokens), np.int32)
    for shard, part in enumerate(parts):
        sources, in_rows = laid[:, shard]
        for number, place in enumerate(part, start=1):
            each = samples[place.member]
            length, count = len(each.prompt), len(each.output) - 1
            prompt_stop, stop = place.prompt + length, place.output + count
            prompt, own = slice(place.prompt, prompt_stop), slice(place.output, stop)
            if place.first:
                tokens[shard, prompt] = each.prompt
                positions[shard, prompt] = np.arange(length)
                starts[shard, prompt] = place.prompt
            tokens[shard, own] = each.output[:-1]
            positions[shard, own] = np.arange(length, length + count)
            starts[shard, own] = place.output
            begins[shard, own], ends[shard, own] = place.prompt, prompt_stop
            if shape.rows:
                at = place.row * shape.tokens + place.column
                stood = np.r_[place.prompt : prompt_stop, place.output : stop]
                columns = slice(place.column, place.column + length + count)
                sources[place.row, columns], in_rows[place.row, columns] = stood, number
                # A prompt stands in several places: any of them will do.
                places[shard, stood] = np.arange(at, at + length + count)
            asked = slice(place.target, place.target + each.targets)
            chosen = ... if each.own is None else each.own
            targets[shard, asked] = each.output[chosen]
            segments[shard, asked] = number
            # The prompt's last position predicts the first token, the output's own the others.
            by = np.arange(place.output - 1, place.output + count)
            by[0] = prompt_stop - 1
            predicts[shard, asked] = by[chosen]
    seen: Rows | Spans = Spans(starts, begins, ends)
    if shape.rows:
        sources, in_rows = laid.reshape(2, -1, shape.tokens)
        seen = Rows(in_rows, sources, places)
    return TokenBatch(tokens, targets, segments, positions, SharedPrompts(seen, predicts))


def halved(shape: Shape, parts: Sequence[Sequence[Place]], samples: Sequence[Sample]) -> Shape:
    """Half of the shape where that is enough for these parts, so that less is padding."""
    half = Shape(shape.positions // 2, -(-shape.rows // 2), shape.tokens)
    for part in parts:
        last, rows = part[-1], max(place.row for place in part) + 1
        most = max(_used(last, samples), last.target + samples[last.member].targets)
        if most > half.positions or rows > half.rows:
            return shape
    return half
