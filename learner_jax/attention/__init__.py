"""Causal attention inside the segments of packed rows, by the kernel that suits the platform.

splash    TPUs
cudnn     NVIDIA GPUs, in bfloat16 or float16
xla       everywhere, in any type

On a mesh rows are cut over data and fsdp, heads over tensor, columns over context. Context
parallelism keeps the queries where they are and gathers keys and values, which grouped heads make
small (Llama 3, arXiv 2407.21783, section 3.3.2). A causal row costs more at its end, so with c
shards the row is cut into 2c chunks and shard i holds chunks i and 2c - 1 - i: the zigzag order.
Only the decoder's inside is in that order; `to_zigzag` and `from_zigzag` convert at its borders.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Int

from learner_jax.attention import cudnn, splash, xla
from learner_jax.packing import Rows, Spans
from learner_jax.sharding import Execution, mesh_axes
from runspec.core import schema
from runspec.core.errors import UserError


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
            columns are in the order of `to_zigzag`.
        segment_ids: positive and equal in the columns of a segment, which lies in one piece;
            0 for padding.
        execution: the kernel and the mesh.

    Returns:
        [B, T, H, h] in the type of q; zeros at padding, whose gradients are zeros too.

    Raises:
        UserError: the kernel that `execution` names cannot run here, or not on these arrays.
    """
    mesh = execution.mesh
    device = jax.local_devices()[0] if mesh is None else mesh.devices.flat[0]
    shards = context_shards(mesh, q.shape[1])
    kernel = _kernel(execution.attention, device, q.dtype, q.shape[-1], shards)
    return attend_on_mesh(kernel, q, k, v, segment_ids, mesh)


def _kernel(
    name: schema.Attention, device: jax.Device, dtype: np.dtype, head_size: int, shards: int
) -> Kernel:
    """The kernel that is named, or for "auto" the platform's own where it takes the arrays."""
    nvidia = device.platform == "gpu" and device.device_kind.startswith("NVIDIA")
    found, most = f"and here are {device.device_kind} devices", cudnn.MAX_HEAD_SIZE
    # By kernel: what keeps it from running here, and the remedy.
    faults: dict[schema.Attention, list[tuple[bool, str, str]]] = {
        "splash": [
            (
                device.platform != "tpu",
                f"splash attention runs on TPUs, {found}",
                "set learner.attention: auto",
            ),
            (
                dtype not in splash.DTYPES,
                f"splash attention computes in bfloat16 or float32, not in {dtype.name}",
                "set learner.attention: xla",
            ),
        ],
        "cudnn": [
            (
                not nvidia,
                f"cuDNN attention runs on NVIDIA GPUs, {found}",
                "set learner.attention: auto",
            ),
            (
                shards > 1,
                f"cuDNN attention needs whole rows, and learner.mesh.context cuts them in {shards}",
                "set learner.mesh.context: 1 and raise fsdp, or learner.attention: xla",
            ),
            (
                dtype not in cudnn.DTYPES,
                f"cuDNN attention computes in bfloat16 or float16, not in {dtype.name}",
                "set learner.compute_dtype: bfloat16, or learner.attention: xla",
            ),
            (
                head_size % 8 > 0 or head_size > most,
                f"cuDNN attention takes head sizes that are multiples of 8 up to {most}, not "
                f"{head_size}",
                "set learner.attention: xla",
            ),
        ],
        "xla": [],
    }
    if name == "auto":
        name = next(n for n, all_ in faults.items() if not any(fault for fault, *_ in all_))
    for fault, what, remedy in faults[name]:
        if fault:
            raise UserError(what, place="learner.attention", remedy=remedy)
    if name == "splash":
        return splash.attend
    if name == "cudnn":
        return partial(cudnn.attend, rows=cudnn.rows_for(device))
    return xla.attend


def attend_shared(
    q: Float[Array, "B U H h"],
    k: Float[Array, "B U K h"],
    v: Float[Array, "B U K h"],
    shared: Rows | Spans,
    execution: Execution,
) -> Float[Array, "B U H h"]:
    """Apply `packed_attention` where samples that begin with one prompt share its positions.

    Everything but attention treats a position by itself, so that a prompt is computed once. The
    `xla` kernel takes spans. For other kernels queries, keys and values are laid out in rows, a
    prompt's in the row of every sample that has it.

    Args:
        q, k, v: of the positions, rotated already.
        shared: what each position sees, which is the same for all samples that have it.
        execution: the kernel and the mesh.
    """
    mesh = execution.mesh
    if isinstance(shared, Spans):
        spans = jnp.stack([shared.starts, shared.prompt_starts, shared.prompt_stops], axis=-1)
        return attend_on_mesh(xla.attend_spans, q, k, v, spans, mesh)
    shards, length = len(q), shared.segment_ids.shape[1]
    sources = shared.sources.reshape(shards, -1)  # [B, R T]
    q, k, v = (taken(x, sources).reshape(-1, length, *x.shape[2:]) for x in (q, k, v))
    mixed = packed_attention(q, k, v, shared.segment_ids, execution)
    return taken(mixed.reshape(shards, -1, *mixed.shape[2:]), shared.places)


def taken(x: Float[Array, "B N ..."], places: Int[Array, "B M"]) -> Float[Array, "B M ..."]:
    """x[b, places[b, m]], within each shard."""
    return jax.vmap(lambda own, at: own[at])(x, places)


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
    # Key/value heads are repeated to the least number that the shards of the query heads divide.
    _, parts = mesh_axes(mesh, "heads", q.shape[2])
    k, v = (jnp.repeat(x, math.lcm(x.shape[2], parts) // x.shape[2], axis=2) for x in (k, v))

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
