"""Attention on a mesh: rows over data and fsdp, heads over tensor, columns over context.

Context parallelism keeps the queries where they are and gathers keys and values, which grouped
heads make small (Llama 3, arXiv 2407.21783, section 3.3.2). A causal row costs more at its end, so
with c shards the row is cut into 2c chunks and shard i holds chunks i and 2c - 1 - i: the zigzag
order. Only the decoder's inside is in that order; `to_zigzag` and `from_zigzag` convert at its
borders.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Int

from learner_jax.sharding import mesh_axes

AXIS = "context"
Kernel = Callable[[Array, Array, Array, Array, Array], Array]
"""(q [B, Q, H, h], k and v [B, T, K, h], segment ids [B, T], columns [Q]) -> [B, Q, H, h]: the
queries at some columns over the keys of whole rows."""


def context_shards(mesh: Mesh | None, length: int) -> int:
    """Shards into which a row's columns are cut: the context axis, or 1 where 2 x the axis does
    not divide the length and each device computes whole rows."""
    shards = mesh.shape[AXIS] if mesh is not None else 1
    return shards if length % (2 * shards) == 0 else 1


def to_zigzag(x: Array, mesh: Mesh | None) -> Array:
    """[B, T, ...] from the order of the row to the zigzag order; as it is without context.

    Two exchanges between neighbours of a ring, of half a shard each.
    """
    return _exchange(x, mesh, _deal)


def from_zigzag(x: Array, mesh: Mesh | None) -> Array:
    """The inverse of `to_zigzag`."""
    return _exchange(x, mesh, _collect)


def attend_on_mesh(
    kernel: Kernel,
    q: Float[Array, "B T H h"],
    k: Float[Array, "B T K h"],
    v: Float[Array, "B T K h"],
    segment_ids: Int[Array, "B T"],
    mesh: Mesh | None,
) -> Float[Array, "B T H h"]:
    """Runs a kernel on each device's rows, heads and columns.

    A dimension that its mesh axes do not divide is whole on every device. Where they divide the
    query heads but not the key/value heads, those are repeated first.

    Args:
        kernel: of one device.
        q, k, v, segment_ids: with the columns in zigzag order.
        mesh: None or a single device calls the kernel as it is.

    Returns:
        In zigzag order too.
    """
    length = q.shape[1]
    if mesh is None or mesh.size == 1:
        return kernel(q, k, v, segment_ids, jnp.arange(length, dtype=jnp.int32))
    shards = context_shards(mesh, length)
    k, v = (_repeated(x, q.shape[2], mesh) for x in (k, v))

    def local(q: Array, k: Array, v: Array, segment_ids: Array) -> Array:
        if shards == 1:
            return kernel(q, k, v, segment_ids, jnp.arange(length, dtype=jnp.int32))
        k, v, segment_ids = (_gathered(x) for x in (k, v, segment_ids))
        return kernel(q, k, v, segment_ids, _own_columns(shards, length))

    heads = PartitionSpec(
        mesh_axes(mesh, "batch", q.shape[0])[0],
        AXIS if shards > 1 else None,
        mesh_axes(mesh, "heads", q.shape[2])[0],
        None,
    )
    ids = PartitionSpec(*heads[:2])
    # Kernels of custom calls do not say over which axes their results vary: no check of that.
    return jax.shard_map(
        local, mesh=mesh, in_specs=(heads, heads, heads, ids), out_specs=heads, check_vma=False
    )(q, k, v, segment_ids)


def _repeated(x: Float[Array, "B T K h"], heads: int, mesh: Mesh) -> Float[Array, "B T M h"]:
    """Key/value heads repeated to the least number that the shards of the query heads divide."""
    _, shards = mesh_axes(mesh, "heads", heads)
    kv_heads = x.shape[2]
    return jnp.repeat(x, math.lcm(kv_heads, shards) // kv_heads, axis=2)


def _own_columns(shards: int, length: int) -> Int[Array, " Q"]:
    """Columns of the chunks i and 2c - 1 - i of this device."""
    own, chunk = jax.lax.axis_index(AXIS), length // (2 * shards)
    first = jnp.stack([own, 2 * shards - 1 - own]) * chunk
    return (first[:, None] + jnp.arange(chunk)).reshape(-1).astype(jnp.int32)


def _gathered(x: Array) -> Array:
    """Whole rows in order, from the two chunks of each device; the gradient is scattered back."""
    front, back = jnp.split(jax.lax.all_gather(x, AXIS), 2, axis=2)  # [c, B, chunk, ...] each
    chunks = jnp.moveaxis(jnp.concatenate([front, back[::-1]]), 0, 1)  # [B, 2c, chunk, ...]
    return chunks.reshape(x.shape[0], -1, *x.shape[2:])


def _exchange(
    x: Array, mesh: Mesh | None, move: Callable[[Array, Array, int], tuple[Array, Array]]
) -> Array:
    """`move` of each device's two halves."""
    shards = context_shards(mesh, x.shape[1])
    if mesh is None or shards == 1:
        return x
    spec = PartitionSpec(mesh_axes(mesh, "batch", x.shape[0])[0], AXIS)

    def local(x: Array) -> Array:
        front, back = jnp.split(x, 2, axis=1)
        return jnp.concatenate(move(front, back, shards), axis=1)

    return jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec)(x)


def _owner(chunk: int, shards: int) -> int:
    return min(chunk, 2 * shards - 1 - chunk)


def _deal(front: Array, back: Array, shards: int) -> tuple[Array, Array]:
    """Chunks 2i and 2i + 1 of device i -> i and 2c - 1 - i.

    Even chunks go to as many different devices as there are, and so do odd ones; of the two that
    a device holds at last, the even one is the first where its own number is even.
    """
    even = jax.lax.ppermute(front, AXIS, [(i, _owner(2 * i, shards)) for i in range(shards)])
    odd = jax.lax.ppermute(back, AXIS, [(i, _owner(2 * i + 1, shards)) for i in range(shards)])
    return _swap_on_odd_devices(even, odd)


def _collect(front: Array, back: Array, shards: int) -> tuple[Array, Array]:
    even, odd = _swap_on_odd_devices(front, back)
    return (
        jax.lax.ppermute(even, AXIS, [(_owner(2 * i, shards), i) for i in range(shards)]),
        jax.lax.ppermute(odd, AXIS, [(_owner(2 * i + 1, shards), i) for i in range(shards)]),
    )


def _swap_on_odd_devices(a: Array, b: Array) -> tuple[Array, Array]:
    odd = jax.lax.axis_index(AXIS) % 2 == 1
    return jnp.where(odd, b, a), jnp.where(odd, a, b)
