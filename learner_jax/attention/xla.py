"""Packed attention in plain XLA: right on every platform, and in float64.

Short rows are attended at once. Longer rows go a tile at a time. A tile is a block of queries of
one row, and visits only the blocks of keys that it sees (`key_blocks`). So the work grows
with the sum of the squared segment lengths, and memory with T, not with T x T. Softmax is taken
online and its backward pass recomputed from the log-sum-exp, after FlashAttention-2 (arXiv
2307.08691, algorithms 1 and 2).

A segment lies in one piece, so the query at column t sees the columns start .. t, where start is
the column at which its segment begins: two numbers a query instead of a mask. Where samples share a
prompt, the queries of an output see that of their prompt too: two more.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int

from learner_jax.sharding import wide_dtype


def segment_starts(segment_ids: Int[Array, "B T"]) -> Int[Array, "B T"]:
    """The column at which the segment of each column begins; T, past every key, at padding.

    Args:
        segment_ids: equal and positive in the columns of a segment, 0 for padding.
    """
    length = segment_ids.shape[1]
    begins = jnp.where(_differs_from_left(segment_ids), jnp.arange(length, dtype=jnp.int32), 0)
    return jnp.where(segment_ids == 0, length, jax.lax.cummax(begins, axis=1))


def segment_lengths(segment_ids: Int[Array, "B T"]) -> Int[Array, "B T"]:
    """The length of the segment of each column; 0 at padding."""
    length = segment_ids.shape[1]
    last = jnp.roll(_differs_from_left(segment_ids), -1, axis=1)  # column 0 always differs
    ends = jnp.where(last, jnp.arange(length, dtype=jnp.int32) + 1, length)
    stops = jax.lax.cummin(ends, axis=1, reverse=True)
    return jnp.where(segment_ids == 0, 0, stops - segment_starts(segment_ids))


def _differs_from_left(segment_ids: Int[Array, "B T"]) -> Bool[Array, "B T"]:
    new = segment_ids[:, 1:] != segment_ids[:, :-1]
    return jnp.pad(new, ((0, 0), (1, 0)), constant_values=True)


class Prompts(NamedTuple):
    """The columns, [first, stop), of a prompt that each query sees besides; none: stop <= first."""

    first: Any
    stop: Any
    """Int [*B, Q]."""


def visible(
    starts: Int[Array, "*B Q"],
    columns: Int[Array, "*B Q"],
    keys: Int[Array, " N"],
    prompts: Prompts | None = None,
) -> Bool[Array, "*B Q N"]:
    """Whether each query sees each of the keys, all given by their columns."""
    own = (starts[..., None] <= keys) & (keys <= columns[..., None])
    if prompts is None:
        return own
    return own | ((prompts.first[..., None] <= keys) & (keys < prompts.stop[..., None]))


def key_blocks(
    starts: Int[Array, "*B Q"], columns: Int[Array, "*B Q"], block: int
) -> tuple[Int[Array, "*B"], Int[Array, "*B"]]:
    """The blocks of keys, [first, stop), in which the queries together see anything.

    Args:
        starts, columns: of the queries; those that see nothing have start > column.
        block: keys in a block.

    Returns:
        first and stop; stop <= first where the queries see nothing.
    """
    last = jnp.max(jnp.where(starts <= columns, columns, -1), axis=-1)
    return jnp.min(starts, axis=-1) // block, last // block + 1


DIRECT = 128
"""Longest row attended at once: on a CPU tiles take a half to a third of the time from 256 on."""
BLOCK = 128
LONG_BLOCK, SHARED_BLOCK = 512, 256
"""Queries of a tile and keys of a block, up to `LONG` tokens and beyond, where fewer and larger
steps cost a CPU no more, and a GPU starts kernels for each; and beyond, where prompts are shared:
samples of any length begin in any column, and larger blocks are seen in part."""
LONG = 8192
SAVED = "attention"
"""Name, for remat policies, of what the backward pass needs from the forward one: output and
log-sum-exp. A policy that saves them spares the second forward pass."""


def attend(
    q: Float[Array, "B Q H h"],
    k: Float[Array, "B T K h"],
    v: Float[Array, "B T K h"],
    segment_ids: Int[Array, "B T"],
    columns: Int[Array, " Q"],
) -> Float[Array, "B Q H h"]:
    """See `packed_attention`, of the queries at some columns of the row over all keys.

    Args:
        q: queries at `columns`.
        k, v: keys and values of the whole row, in order.
        segment_ids: of the whole row, in order.
        columns: where in the row each query stands.
    """
    starts = segment_starts(segment_ids)[:, columns]  # [B, Q]
    return _attend(q, k, v, starts, columns, None)


def attend_spans(
    q: Float[Array, "B T H h"],
    k: Float[Array, "B T K h"],
    v: Float[Array, "B T K h"],
    spans: Int[Array, "B T 3"],
    columns: Int[Array, " T"],
) -> Float[Array, "B T H h"]:
    """See `attend_shared`: the start of each query's segment, and first and stop of its prompt."""
    starts, first, stop = jnp.moveaxis(spans, -1, 0)
    return _attend(q, k, v, starts, columns, Prompts(first, stop))


def _attend(
    q: Array, k: Array, v: Array, starts: Array, columns: Array, prompts: Prompts | None
) -> Array:
    how = _direct if k.shape[1] <= DIRECT else _blocked
    return how(q, k, v, starts, columns, prompts)


def _direct(
    q: Float[Array, "B Q H h"],
    k: Float[Array, "B T K h"],
    v: Float[Array, "B T K h"],
    starts: Int[Array, "B Q"],
    columns: Int[Array, " Q"],
    prompts: Prompts | None,
) -> Float[Array, "B Q H h"]:
    batch, queries, heads, size = q.shape
    kv_heads = k.shape[2]
    wide = wide_dtype(q.dtype)
    # The queries of a group lie one after another: [B, K, G, Q, h].
    grouped = (q * size**-0.5).reshape(batch, queries, kv_heads, heads // kv_heads, size)
    grouped = jnp.transpose(grouped, (0, 2, 3, 1, 4))
    stacked = grouped.reshape(batch, kv_heads, -1, size)  # [B, K, G Q, h]
    scores = jnp.einsum("bkqh,btkh->bkqt", stacked, k, preferred_element_type=wide)
    scores = scores.reshape(*grouped.shape[:-1], -1)  # [B, K, G, Q, T]
    mask = visible(starts, columns, jnp.arange(k.shape[1]), prompts)  # [B, Q, T]
    # Finite, so that a query that sees no key makes no NaN.
    scores = jnp.where(mask[:, None, None], scores, jnp.finfo(wide).min)
    # The sum divides last, over h numbers a query, not T. The maximum cancels: no gradient.
    weights = jnp.exp(scores - jax.lax.stop_gradient(scores.max(axis=-1, keepdims=True)))
    total = weights.sum(axis=-1).reshape(batch, kv_heads, -1, 1)  # [B, K, G Q, 1]
    weights = weights.astype(v.dtype).reshape(batch, kv_heads, -1, k.shape[1])
    mixed = jnp.einsum("bkqt,btkh->bkqh", weights, v, preferred_element_type=wide) / total
    out = jnp.transpose(mixed.reshape(grouped.shape), (0, 3, 1, 2, 4))  # [B, Q, K, G, h]
    out = jnp.where((starts <= columns)[:, :, None, None], out.reshape(q.shape), 0.0)
    return checkpoint_name(out.astype(q.dtype), SAVED)


class _Tile(NamedTuple):
    """N queries of one row."""

    row: Any
    """Int []."""
    q: Any
    """[K, G, N, h]."""
    starts: Any
    columns: Any
    """Int [N]: the keys that each query sees, none in the padding of the last tile."""
    prompts: Any
    """`Prompts` of the queries, [N], or None."""


def _blocked(
    q: Float[Array, "B Q H h"],
    k: Float[Array, "B T K h"],
    v: Float[Array, "B T K h"],
    starts: Int[Array, "B Q"],
    columns: Int[Array, " Q"],
    prompts: Prompts | None,
) -> Float[Array, "B Q H h"]:
    batch, queries, heads, size = q.shape
    kv_heads = k.shape[2]
    longer = LONG_BLOCK if prompts is None else SHARED_BLOCK
    block = BLOCK if k.shape[1] <= LONG else longer
    padded = -queries % block
    q = jnp.pad(q, ((0, 0), (0, padded), (0, 0), (0, 0)))
    q = q.reshape(batch, -1, block, kv_heads, heads // kv_heads, size)
    q = jnp.transpose(q, (0, 1, 3, 4, 2, 5))  # [B, tiles, K, G, N, h]
    starts = jnp.pad(starts, ((0, 0), (0, padded)), constant_values=k.shape[1])
    tiles = _Tile(
        row=jnp.repeat(jnp.arange(batch, dtype=jnp.int32), q.shape[1]),
        q=q.reshape(-1, *q.shape[2:]),
        starts=starts.reshape(-1, block),
        columns=jnp.tile(jnp.pad(columns, (0, padded)).reshape(-1, block), (batch, 1)),
        prompts=jax.tree.map(
            lambda x: jnp.pad(x, ((0, 0), (0, padded))).reshape(-1, block), prompts
        ),
    )

    def by_head(x: Array) -> Array:  # [B, T, K, h] -> [B, K, whole blocks, h]
        x = jnp.pad(x, ((0, 0), (0, -x.shape[1] % block), (0, 0), (0, 0)))
        return jnp.transpose(x, (0, 2, 1, 3))

    out = _attend_tiles(tiles.q, by_head(k), by_head(v), tiles)
    out = jnp.transpose(out.reshape(q.shape), (0, 1, 4, 2, 3, 5))  # [B, tiles, N, K, G, h]
    return out.reshape(batch, -1, heads, size)[:, :queries]


@jax.custom_vjp
def _attend_tiles(q: Array, k: Array, v: Array, tiles: _Tile) -> Array:
    return _forward(q, k, v, tiles)[0]


def _forward(q: Array, k: Array, v: Array, tiles: _Tile) -> tuple[Array, tuple[Any, ...]]:
    """Output, shaped like q, [tiles, K, G, N, h], and what `_backward` needs."""

    def one_tile(tile: _Tile) -> tuple[Array, Array]:
        def one_block(i: Array, carry: tuple[Array, ...]) -> tuple[Array, ...]:
            top, total, mixed = carry
            number = number_of(i)
            keys, values = (_block(x, tile, number) for x in (k, v))
            scores, _ = _scores(tile, keys, number)
            new_top = jnp.maximum(top, scores.max(axis=-1))
            weights = jnp.exp(scores - new_top[..., None])
            shrink = jnp.exp(top - new_top)
            total = total * shrink + weights.sum(axis=-1)
            gain = _einsum("kgqt,kth->kgqh", weights.astype(v.dtype), values)
            return new_top, total, mixed * shrink[..., None] + gain

        wide = wide_dtype(q.dtype)
        empty = jnp.zeros(tile.q.shape, wide)
        carry = (jnp.full(empty.shape[:-1], jnp.finfo(wide).min), empty[..., 0], empty)
        first, stop, number_of = _visits(tile)
        top, total, mixed = jax.lax.fori_loop(first, stop, one_block, carry)
        # Queries that see nothing stand in tiles that were skipped, or saw masked scores alone.
        sees = tile.starts <= tile.columns
        total = jnp.where(sees, total, 1.0)
        out = jnp.where(sees[:, None], mixed / total[..., None], 0.0)
        return out.astype(q.dtype), top + jnp.log(total)

    out, lse = jax.lax.map(one_tile, tiles._replace(q=q))
    out, lse = checkpoint_name(out, SAVED), checkpoint_name(lse, SAVED)
    return out, (q, k, v, tiles, out, lse)


def _backward(residuals: tuple[Any, ...], d_out: Array) -> tuple[Array, Array, Array, None]:
    q, k, v, tiles, out, lse = residuals
    wide = wide_dtype(q.dtype)

    def one_tile(
        sums: tuple[Array, Array], inputs: tuple[_Tile, Array, Array, Array]
    ) -> tuple[tuple[Array, Array], Array]:
        tile, out, lse, d_out = inputs
        sees = (tile.starts <= tile.columns)[:, None]
        d_out = jnp.where(sees, d_out, 0)
        # d softmax: d_scores = weights * (d_weights - sum_t weights d_weights).
        inner = jnp.sum(out.astype(wide) * d_out.astype(wide), axis=-1, keepdims=True)

        def one_block(i: Array, carry: tuple[Array, ...]) -> tuple[Array, ...]:
            dk, dv, dq = carry
            number = number_of(i)
            keys, values = (_block(x, tile, number) for x in (k, v))
            scores, mask = _scores(tile, keys, number)
            weights = jnp.where(mask, jnp.exp(scores - lse[..., None]), 0.0)
            d_weights = _einsum("kgqh,kth->kgqt", d_out, values)
            d_scores = weights * (d_weights - inner) * q.shape[-1] ** -0.5
            d_scores = d_scores.astype(q.dtype)
            dk = _add(dk, tile, number, _einsum("kgqt,kgqh->kth", d_scores, tile.q))
            gain = _einsum("kgqt,kgqh->kth", weights.astype(q.dtype), d_out)
            dv = _add(dv, tile, number, gain)
            return dk, dv, dq + _einsum("kgqt,kth->kgqh", d_scores, keys)

        first, stop, number_of = _visits(tile)
        dk, dv, dq = jax.lax.fori_loop(
            first, stop, one_block, (*sums, jnp.zeros(tile.q.shape, wide))
        )
        return (dk, dv), dq.astype(q.dtype)

    zeros = (jnp.zeros(k.shape, wide), jnp.zeros(v.shape, wide))
    (dk, dv), dq = jax.lax.scan(one_tile, zeros, (tiles._replace(q=q), out, lse, d_out))
    return dq, dk.astype(k.dtype), dv.astype(v.dtype), None


_attend_tiles.defvjp(_forward, _backward)


def _visits(tile: _Tile) -> tuple[Array, Array, Callable[[Array], Array]]:
    """The loop over the blocks that a tile sees: its ends, and the block of each of its numbers.

    A prompt stands before its outputs, so the blocks of the tile's prompts come first, and then
    those from the first own start on that are not among them.
    """
    block = tile.starts.size
    first, stop = key_blocks(tile.starts, tile.columns, block)
    if tile.prompts is None:
        return first, stop, lambda i: i
    begins, ends = tile.prompts
    there = begins < ends
    low = jnp.min(jnp.where(there, begins // block, first))
    high = jnp.max(jnp.where(there, (ends - 1) // block + 1, low))
    own = jnp.maximum(first, high)
    return own - (high - low), stop, lambda i: jnp.where(i < own, i - own + high, i)


def _scores(tile: _Tile, keys: Array, number: Array) -> tuple[Array, Array]:
    """Scores of a tile's queries over a block of keys, [K, G, N, N], and which of them count.

    The others are finite, so that a query that sees no key makes no NaN.
    """
    scores = _einsum("kgqh,kth->kgqt", tile.q, keys) * tile.q.shape[-1] ** -0.5
    own = number * tile.starts.size + jnp.arange(tile.starts.size)
    mask = visible(tile.starts, tile.columns, own, tile.prompts)
    return jnp.where(mask, scores, jnp.finfo(scores.dtype).min), mask


def _einsum(formula: str, a: Array, b: Array) -> Array:
    """Summed in at least float32."""
    return jnp.einsum(formula, a, b, preferred_element_type=wide_dtype(a.dtype))


def _place(tile: _Tile, number: Array) -> tuple[Array, ...]:
    zero = jnp.zeros_like(tile.row)  # indices are of one type
    return tile.row, zero, number * tile.starts.size, zero


def _block(x: Float[Array, "B K T h"], tile: _Tile, number: Array) -> Float[Array, "K N h"]:
    """Block `number` of the tile's row."""
    shape = (1, x.shape[1], tile.starts.size, x.shape[3])
    return jax.lax.dynamic_slice(x, _place(tile, number), shape)[0]


def _add(x: Float[Array, "B K T h"], tile: _Tile, number: Array, gain: Array) -> Array:
    total = _block(x, tile, number) + gain
    return jax.lax.dynamic_update_slice(x, total[None], _place(tile, number))
