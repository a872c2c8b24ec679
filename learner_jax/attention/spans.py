"""Which keys a query sees in a packed row, as column numbers.

A segment lies in one piece, so the query at column t sees the columns start .. t, where start is
the column at which its segment begins: two numbers a query instead of a mask.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int


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


def visible(
    starts: Int[Array, "*B Q"], columns: Int[Array, "*B Q"], keys: Int[Array, " N"]
) -> Bool[Array, "*B Q N"]:
    """Whether each query sees each of the keys, all given by their columns."""
    return (starts[..., None] <= keys) & (keys <= columns[..., None])


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
