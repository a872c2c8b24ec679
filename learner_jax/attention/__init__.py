"""Causal attention inside the segments of packed rows."""

from __future__ import annotations

from jaxtyping import Array, Float, Int

from learner_jax.attention import xla
from learner_jax.attention.context import attend_on_mesh
from learner_jax.attention.xla import SAVED
from learner_jax.execution import Execution

__all__ = ["SAVED", "packed_attention"]


def packed_attention(
    q: Float[Array, "B T H h"],
    k: Float[Array, "B T K h"],
    v: Float[Array, "B T K h"],
    segment_ids: Int[Array, "B T"],
    execution: Execution,
) -> Float[Array, "B T H h"]:
    """Softmax(q k / sqrt(h)) v, each query over the keys of its own segment up to itself.

    Query head n reads key/value head n // (H / K). Scores and softmax are in at least float32.

    Args:
        q, k, v: queries, keys and values, rotated already. Under a mesh with context > 1 the
            columns are in the order of `context.to_zigzag`.
        segment_ids: positive and equal in the columns of a segment, which lies in one piece;
            0 for padding.
        execution: the kernel and the mesh.

    Returns:
        [B, T, H, h] in the type of q; zeros at padding, whose gradients are zeros too.
    """
    return attend_on_mesh(xla.attend, q, k, v, segment_ids, execution.mesh)
