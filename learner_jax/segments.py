"""Sums over the samples of packed rows."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def segment_sums(
    values: Float[Array, "B T"], segment_ids: Int[Array, "B T"]
) -> Float[Array, "B T"]:
    """At every position the sum of `values` over the whole run of equal ids that it lies in.

    Two scans that begin anew at every boundary, one from each side; a position counts in both. They
    take log T parallel steps over [B, T]: no scatter, no number of segments to be known beforehand,
    and no difference of long sums, in which a short segment would lose its digits.

    Args:
        values: [B, T].
        segment_ids: equal ids adjacent to each other: one sample, or padding.
    """
    boundary = segment_ids[:, 1:] != segment_ids[:, :-1]
    first = jnp.pad(boundary, ((0, 0), (1, 0)), constant_values=True)
    last = jnp.pad(boundary, ((0, 0), (0, 1)), constant_values=True)
    before = _running_sums(values, first, reverse=False)
    after = _running_sums(values, last, reverse=True)
    return before + after - values


def _running_sums(
    values: Float[Array, "B T"], begins: Bool[Array, "B T"], *, reverse: bool
) -> Float[Array, "B T"]:
    """Sums along a row of all values so far, begun anew where `begins`."""

    def join(left: tuple[Array, Array], right: tuple[Array, Array]) -> tuple[Array, Array]:
        (sum_left, begun_left), (sum_right, begun_right) = left, right
        return jnp.where(begun_right, sum_right, sum_left + sum_right), begun_left | begun_right

    return jax.lax.associative_scan(join, (values, begins), axis=1, reverse=reverse)[0]
