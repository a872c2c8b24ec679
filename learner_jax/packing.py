"""Samples packed into rows of a fixed length, and the arrays over the positions of such rows.

Everything that belongs to output token t of a sample lies at the position that predicts it, P-1+t
of the sample, so that no program shifts anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np
from pydantic import ConfigDict

from runspec.core.errors import UserError

ARRAYS = ConfigDict(arbitrary_types_allowed=True)
"""Pydantic's config of dataclasses that hold arrays."""
Data = Any
"""numpy on the host, `jax.Array` on the mesh, `jax.ShapeDtypeStruct` before either exists."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Rows:
    """Where the U positions of each of B shards stand in the R packed rows of that shard: i32."""

    segment_ids: Data
    """[B R, T]: 1, 2, ... for the samples of a row, 0 for padding."""
    sources: Data
    """[B R, T]: which of its shard's positions stands in each column; any in padding."""
    places: Data
    """[B, U]: row * T + column of one place, of those rows, where the position stands."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Spans:
    """What each of the U positions of B shards sees, up to itself: i32 [B, U]."""

    starts: Data
    """The first position of its prompt or, for an output, of that; U at padding."""
    prompt_starts: Data
    prompt_stops: Data
    """The positions of an output's prompt, [start, stop); 0 and 0 for those of a prompt."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SharedPrompts:
    """How samples share the positions of their prompt (`learner_jax.shared_prompts`)."""

    seen: Rows | Spans
    predicts: Data
    """i32 [B, U]: the position that predicts each target."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TokenBatch:
    """Rows of packed samples, int32 [B, T] each; [M, B, T] for all microbatches of an update.

    Where prompts are shared, B is the shards and T the positions U of each. Targets and segment ids
    are then in an order of their own, with up to U targets.
    """

    tokens: Data
    targets: Data
    """The sampled token that the position predicts; -1 where it predicts none."""
    segment_ids: Data
    """1, 2, ... for the samples of a row, 0 for padding."""
    positions: Data
    """Position of each token in its sample, from 0."""
    shared: Data = None
    """`SharedPrompts`; None where every sample has a prompt of its own."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LossInputs:
    """Values of each output token for the loss, float32, shaped as the tokens are; read where
    weights > 0. Runs that train on documents have weights alone."""

    weights: Data
    """mask_t / N, of `loss.token_weights`, or a document's w_t: 0 where nothing is trained."""
    advantages: Data = None
    old_logprobs: Data = None
    """log pi_old."""
    sampler_logprobs: Data = None
    """log mu, as the validator recomputed it."""
    ref_logprobs: Data | None = None
    """Log-probs of the reference policy; None where `kl.coef` is 0."""


@dataclass(frozen=True)
class Sample:
    """One prompt, at least a token, and its output, at least a token. int32 [P] and [n]."""

    prompt: np.ndarray
    output: np.ndarray
    own: np.ndarray | None = None
    """bool [n]: the m output tokens that the policy sampled, the targets; None: all of them."""

    def __len__(self) -> int:
        return len(self.prompt) + len(self.output)

    @property
    def targets(self) -> int:
        """m."""
        return len(self.output) if self.own is None else int(np.count_nonzero(self.own))


class Placement(NamedTuple):
    """Where one sample's output is predicted: [start, stop) of a row, n positions."""

    microbatch: int
    row: int
    start: int
    stop: int
    own: np.ndarray | None
    """`Sample.own`."""

    @property
    def where(self) -> tuple[int, int, slice | np.ndarray]:
        """The m positions that predict its targets, as an index into [M, rows, tokens]."""
        columns: slice | np.ndarray = slice(self.start, self.stop)
        if self.own is not None:
            columns = self.start + np.flatnonzero(self.own)
        return self.microbatch, self.row, columns


@dataclass(frozen=True)
class Packed:
    """Microbatches of the same shape, [M, rows, tokens], and where every sample went."""

    batch: TokenBatch
    """numpy int32 [M, rows, tokens] each."""
    microbatches: int
    """Those that hold samples; the rest of M is padding."""
    placements: tuple[Placement, ...]
    """In the order of the samples."""
    used: int
    """Positions that are no padding."""

    def token_batch(self, index: int) -> TokenBatch:
        """Microbatch `index`, numpy int32 [rows, tokens] each."""
        return jax.tree.map(lambda array: array[index], self.batch)

    def scatter(self, values: Sequence[np.ndarray | float]) -> np.ndarray:
        """Lays per-sample values on the positions that predict the targets.

        Args:
            values: for each sample an array [m], one value a target, or one number for all.

        Returns:
            float32 [M, rows, tokens], 0 elsewhere (float64 if the values are).
        """
        wide = any(isinstance(value, np.ndarray) and value.dtype == np.float64 for value in values)
        out = np.zeros(self.batch.tokens.shape, np.float64 if wide else np.float32)
        for place, value in zip(self.placements, values, strict=True):
            out[place.where] = value
        return out

    def gather(self, array: np.ndarray) -> list[np.ndarray]:
        """The inverse of `scatter`: for each sample the [m] values of its targets.

        Args:
            array: [M, rows, tokens].
        """
        return [array[place.where] for place in self.placements]


def pack(
    samples: Sequence[Sample],
    *,
    tokens: int,
    rows: int,
    shards: int = 1,
    microbatches: int | None = None,
) -> Packed:
    """Packs samples by first-fit decreasing: the longest first, each into the first row with room.

    No sample is split, dropped or repeated. The same samples in the same order give the same rows.

    Attention costs a row the sum of its squared sample lengths, all else is the same for every row.
    The costliest rows make up the first microbatch and so on, and in a microbatch they are dealt to
    the shards back and forth (0 1 2 2 1 0 0 1 ...). So in a microbatch the loads of two shards
    differ by at most its costliest row less its cheapest. All wait for the costliest shard: over
    the microbatches its loads add up to at most the mean load and the cost of one row.

    Args:
        samples: at least one.
        tokens: length of a row.
        rows: of a microbatch, a multiple of `shards`; the last one is filled with rows of padding.
        shards: devices that share the rows of a microbatch, each a contiguous part.
        microbatches: M, the rest padding; by default as many as are needed.

    Raises:
        UserError: a sample is longer than a row, or there are too many for M microbatches.
    """
    lengths = require_room(samples, tokens)
    prompts = np.array([len(sample.prompt) for sample in samples])
    order = np.argsort(-lengths, kind="stable")
    row_of = np.empty_like(order)
    row_of[order] = first_fit(lengths[order].tolist(), tokens)
    row_of = _dealt(np.bincount(row_of, weights=lengths.astype(float) ** 2), rows, shards)[row_of]
    needed = int(row_of.max()) // rows + 1
    if microbatches is not None and needed > microbatches:
        raise UserError(
            f"{len(samples)} samples of up to {lengths.max()} tokens need {needed} microbatches "
            f"of {rows} rows of {tokens} tokens, the spec's sizes allow for {microbatches}",
            place="learner.packing",
            remedy="the batch is larger or its rollouts are longer than the spec says: report this",
        )
    begin, batch = _laid_out(samples, order, row_of, (microbatches or needed, rows, tokens))
    start = begin + prompts - 1
    columns = (row_of // rows, row_of % rows, start, begin + lengths - 1)
    own = [sample.own for sample in samples]
    placements = tuple(map(Placement, *(column.tolist() for column in columns), own))
    return Packed(batch, needed, placements, int(lengths.sum()))


def require_room(samples: Sequence[Sample], tokens: int) -> np.ndarray:
    """Return the lengths of samples, at least one, that fit into rows of so many tokens.

    Raises:
        UserError: one is longer.
    """
    if not samples:
        raise ValueError("no samples to pack")
    if not all(len(sample.prompt) and len(sample.output) for sample in samples):
        raise ValueError("a sample needs a prompt token and an output token")
    lengths = np.array([len(sample) for sample in samples])
    if lengths.max() > tokens:
        raise UserError(
            f"a sample has {lengths.max()} tokens, a packed row {tokens}",
            place="learner.packing.tokens",
            remedy=f"raise it to at least {lengths.max()}; samples are never cut",
        )
    return lengths


def _laid_out(
    samples: Sequence[Sample], order: np.ndarray, row_of: np.ndarray, shape: tuple[int, int, int]
) -> tuple[np.ndarray, TokenBatch]:
    """The column where each sample begins, and the arrays of all rows.

    Every row is its samples, in the given order, and a gap: joined end to end they are the arrays.
    """
    tokens, rows = shape[2], (int(row_of.max()) // shape[1] + 1) * shape[1]
    lengths = np.array([len(sample) for sample in samples])
    gaps = tokens - np.bincount(row_of, weights=lengths, minlength=rows).astype(int)
    row = np.concatenate([row_of[order], np.arange(rows)])
    by_row = np.argsort(row, kind="stable")
    row = row[by_row]
    item = np.concatenate([order, np.full(rows, -1)])[by_row]  # -1: a gap, the row's last item
    length = np.concatenate([lengths[order], gaps])[by_row]
    end = np.cumsum(length)

    zero, none = np.zeros(tokens, np.int32), np.full(tokens, -1, np.int32)
    texts: list[np.ndarray] = []
    targets: list[np.ndarray] = []
    for i, n in zip(item.tolist(), length.tolist(), strict=True):
        if i < 0:
            texts.append(zero[:n])
            targets.append(none[:n])
        else:
            prompt, output, own = samples[i].prompt, samples[i].output, samples[i].own
            texts += (prompt, output)
            output = output if own is None else np.where(own, output, none[:1])
            targets += (none[: len(prompt) - 1], output, none[:1])
    number = np.arange(len(item)) - np.searchsorted(row, row) + 1  # of the item in its row

    batch = TokenBatch(*(np.zeros(shape, np.int32) for _ in range(4)))
    flat = jax.tree.map(lambda array: array.reshape(-1)[: end[-1]], batch)
    batch.targets[:] = -1
    np.concatenate(texts, out=flat.tokens, casting="same_kind")
    np.concatenate(targets, out=flat.targets, casting="same_kind")
    flat.segment_ids[:] = np.repeat(np.where(item >= 0, number, 0).astype(np.int32), length)
    flat.positions[:] = np.arange(end[-1], dtype=np.int32)
    flat.positions[:] -= np.repeat((end - length).astype(np.int32), length)
    flat.positions[flat.segment_ids == 0] = 0
    begin = np.empty(len(samples), int)
    begin[item[item >= 0]] = ((end - length) % tokens)[item >= 0]
    return begin, batch


def row_bound(samples: int, longest: int, tokens: int) -> int:
    """Rows of `tokens` that first-fit needs at most for samples of up to `longest` tokens.

    A row that a later sample did not fit into has less than `longest` room, so it holds at least
    floor(tokens / longest) samples; every row but the last is such a row.
    """
    return -(-samples // (tokens // longest))


def first_fit(lengths: Sequence[int], capacity: int) -> list[int]:
    """For each length in turn the first row with room for it; O(n log n)."""
    leaves = 1 << (len(lengths) - 1).bit_length()
    # A binary tree: the leaves are the rows' room, a node knows the larger of its two below.
    room = [capacity] * (2 * leaves)
    rows = []
    for length in lengths:
        node = 1
        while node < leaves:
            node *= 2
            if room[node] < length:
                node += 1
        rows.append(node - leaves)
        room[node] -= length
        while node > 1:
            node //= 2
            room[node] = max(room[2 * node], room[2 * node + 1])
    return rows


def _dealt(cost: np.ndarray, rows: int, shards: int) -> np.ndarray:
    """For each row of a cost its place, microbatch * rows + row, as `pack` says."""
    microbatches = -(-len(cost) // rows)
    places = np.arange(microbatches * rows).reshape(microbatches, shards, rows // shards)
    turns = places.swapaxes(1, 2).copy()  # [M, rows / shards, shards]: each turn a row a shard
    turns[:, 1::2] = turns[:, 1::2, ::-1]
    dealt = np.empty(len(cost), int)
    dealt[np.argsort(-cost, kind="stable")] = turns.reshape(-1)[: len(cost)]
    return dealt
