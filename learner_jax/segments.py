"""Sums over the samples of packed rows."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped


def segment_sums(
    values: Float[Array, "B T"], segment_ids: Int[Array, "B T"]
) -> Float[Array, "B T"]:
    """At every position the sum of `values` over the positions of its row that have its id.

    By doubling: after step k a position holds the sum over the nearest 2^k positions of its sample
    to the left, and to the right. log T steps over [B, T]: no scatter, no number of segments to be
    known beforehand, and no difference of long sums, in which a short sample would lose its digits.

    Args:
        values: [B, T].
        segment_ids: from 0; the positions of an id lie together, as packing puts them.
    """
    segment_ids = jnp.asarray(segment_ids)
    left = right = values
    distance = 1
    while distance < values.shape[1]:
        for_left = _from(segment_ids, -distance, fill=-1) == segment_ids
        for_right = _from(segment_ids, distance, fill=-1) == segment_ids
        left = left + jnp.where(for_left, _from(left, -distance, fill=0), 0)
        right = right + jnp.where(for_right, _from(right, distance, fill=0), 0)
        distance *= 2
    return left + right - values


def _from(x: Shaped[Array, "B T"], distance: int, *, fill: int) -> Shaped[Array, "B T"]:
    """At position t what `x` has at t + distance, `fill` beyond its ends."""
    return jax.lax.pad(x, jnp.asarray(fill, x.dtype), [(0, 0, 0), (-distance, distance, 0)])
