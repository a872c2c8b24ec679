"""Causal attention inside the segments of packed rows."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

BLOCK = 512
"""Longest row attended at once, and queries of a block in longer ones: a block's scores are
B x H x BLOCK x T floats, never B x H x T x T."""


def attend(
    q: Float[Array, "B T H h"],
    k: Float[Array, "B T K h"],
    v: Float[Array, "B T K h"],
    segment_ids: Int[Array, "B T"],
) -> Float[Array, "B T H h"]:
    """Softmax(q k / sqrt(h)) v, each query over the keys of its own segment up to itself.

    Query head n reads key/value head n // (H / K). Scores and softmax are in at least float32.

    Args:
        q, k, v: queries, keys and values, rotated already.
        segment_ids: 1, 2, ... in a row, 0 for padding.

    Returns:
        [B, T, H, h] in the type of q; zeros at padding, whose gradients are zeros too.
    """
    length = q.shape[1]
    if length <= BLOCK:
        return _attend(q, k, v, segment_ids, segment_ids, 0)
    blocks = -(-length // BLOCK)
    padding = blocks * BLOCK - length

    def split(x: Array) -> Array:  # [B, T, ...] -> [blocks, B, BLOCK, ...]
        x = jnp.pad(x, [(0, 0), (0, padding)] + [(0, 0)] * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(x.shape[0], blocks, BLOCK, *x.shape[2:]), 1, 0)

    # Without the checkpoint the backward pass would keep every block's scores: T x T again.
    @jax.checkpoint
    def one_block(block: tuple[Array, Array, Array]) -> Array:
        queries, segments, start = block
        return _attend(queries, k, v, segments, segment_ids, start)

    out = jax.lax.map(one_block, (split(q), split(segment_ids), jnp.arange(blocks) * BLOCK))
    return jnp.moveaxis(out, 0, 1).reshape(q.shape[0], -1, *q.shape[2:])[:, :length]


def _attend(
    q: Float[Array, "B Q H h"],
    k: Float[Array, "B T K h"],
    v: Float[Array, "B T K h"],
    query_segments: Int[Array, "B Q"],
    key_segments: Int[Array, "B T"],
    start: Array | int,
) -> Float[Array, "B Q H h"]:
    """Attention of the queries at positions start, start + 1, ... over all keys."""
    batch, queries, heads, size = q.shape
    kv_heads = k.shape[2]
    wide = jnp.promote_types(q.dtype, jnp.float32)
    # The queries of a group lie one after another: [B, K, G, Q, h].
    grouped = (q * size**-0.5).reshape(batch, queries, kv_heads, heads // kv_heads, size)
    grouped = jnp.transpose(grouped, (0, 2, 3, 1, 4))
    stacked = grouped.reshape(batch, kv_heads, -1, size)  # [B, K, G Q, h]
    scores = jnp.einsum("bkqh,btkh->bkqt", stacked, k, preferred_element_type=wide)
    scores = scores.reshape(*grouped.shape[:-1], -1)  # [B, K, G, Q, T]
    causal = start + jnp.arange(queries)[:, None] >= jnp.arange(k.shape[1])  # [Q, T]
    mask = causal & (query_segments[:, :, None] == key_segments[:, None, :])  # [B, Q, T]
    # Finite, so that a query that sees no key makes no NaN.
    scores = jnp.where(mask[:, None, None], scores, jnp.finfo(wide).min)
    # The sum divides last, over h numbers a query, not T. The maximum cancels: no gradient.
    weights = jnp.exp(scores - jax.lax.stop_gradient(scores.max(axis=-1, keepdims=True)))
    total = weights.sum(axis=-1).reshape(batch, kv_heads, -1, 1)  # [B, K, G Q, 1]
    weights = weights.astype(v.dtype).reshape(batch, kv_heads, -1, k.shape[1])
    mixed = jnp.einsum("bkqt,btkh->bkqh", weights, v, preferred_element_type=wide) / total
    out = jnp.transpose(mixed.reshape(grouped.shape), (0, 3, 1, 2, 4))  # [B, Q, K, G, h]
    out = jnp.where((query_segments != 0)[:, :, None, None], out.reshape(q.shape), 0.0)
    return out.astype(q.dtype)
