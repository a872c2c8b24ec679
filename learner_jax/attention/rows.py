"""Attention in packed rows among positions that are computed once and stand in several rows.

The samples of a group have one prompt. Everything but attention treats a position by itself, so a
prompt that many samples begin with is computed once; for attention alone its queries, keys and
values are laid out in the row of every such sample, where any kernel finds them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
from jaxtyping import Array, Float, Int

from learner_jax.attention import packed_attention
from learner_jax.execution import Execution


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Rows:
    """Where the U positions of each of B shards stand in the R packed rows of that shard: i32."""

    sources: Any
    """[B R, T]: which of its shard's positions stands in each column; any in padding."""
    places: Any
    """[B, U]: row * T + column of one place, of those rows, where the position stands."""


def attend_in_rows(
    q: Float[Array, "B U H h"],
    k: Float[Array, "B U K h"],
    v: Float[Array, "B U K h"],
    segment_ids: Int[Array, "R T"],
    rows: Rows,
    execution: Execution,
) -> Float[Array, "B U H h"]:
    """`packed_attention` in the rows, each position read from one of its places.

    Args:
        q, k, v: of the positions, rotated already.
        segment_ids: of the rows of all shards, one shard after the other.
        rows: where each position stands. What a position sees is the same in all its places.
        execution: the kernel and the mesh.
    """
    shards, length = len(q), segment_ids.shape[1]
    sources = rows.sources.reshape(shards, -1)  # [B, R T]
    q, k, v = (_taken(x, sources).reshape(-1, length, *x.shape[2:]) for x in (q, k, v))
    mixed = packed_attention(q, k, v, segment_ids, execution)
    return _taken(mixed.reshape(shards, -1, *mixed.shape[2:]), rows.places)


def _taken(x: Float[Array, "B N ..."], places: Int[Array, "B M"]) -> Float[Array, "B M ..."]:
    """x[b, places[b, m]], within each shard."""
    return jax.vmap(lambda own, at: own[at])(x, places)
