"""Causal attention inside the segments of packed rows, by the kernel that suits the platform.

splash    TPUs
cudnn     NVIDIA GPUs, in bfloat16 or float16
xla       everywhere, in any type
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Float, Int

from learner_jax.attention import cudnn, splash, xla
from learner_jax.attention.context import Kernel, attend_on_mesh, context_shards
from learner_jax.execution import Execution
from runspec.core.errors import UserError
from runspec.core.spec import schema


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
    refusals: dict[schema.Attention, UserError | None] = {
        "splash": _splash_refusal(device, dtype),
        "cudnn": _cudnn_refusal(device, dtype, head_size, shards),
        "xla": None,
    }
    if name == "auto":
        name = next(name for name, refusal in refusals.items() if refusal is None)
    if (refusal := refusals[name]) is not None:
        raise refusal
    if name == "splash":
        return splash.attend
    if name == "cudnn":
        return partial(cudnn.attend, rows=cudnn.rows_for(device))
    return xla.attend


def _splash_refusal(device: jax.Device, dtype: np.dtype) -> UserError | None:
    if device.platform != "tpu":
        return _wrong_platform("splash attention runs on TPUs", device)
    if dtype not in splash.DTYPES:
        return UserError(
            f"splash attention computes in bfloat16 or float32, not in {dtype.name}",
            place="learner.attention",
            remedy="set learner.attention: xla",
        )
    return None


def _cudnn_refusal(
    device: jax.Device, dtype: np.dtype, head_size: int, shards: int
) -> UserError | None:
    if device.platform != "gpu" or not device.device_kind.startswith("NVIDIA"):
        return _wrong_platform("cuDNN attention runs on NVIDIA GPUs", device)
    if shards > 1:
        return UserError(
            f"cuDNN attention needs whole rows, and learner.mesh.context cuts them in {shards}",
            place="learner.attention",
            remedy="set learner.mesh.context: 1 and raise fsdp, or learner.attention: xla",
        )
    return cudnn.refusal(dtype, head_size)


def _wrong_platform(thing: str, device: jax.Device) -> UserError:
    return UserError(
        f"{thing}, and here are {device.device_kind} devices",
        place="learner.attention",
        remedy="set learner.attention: auto",
    )


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
    """Apply `packed_attention` in rows where one position may stand in several rows.

    The samples of a group have one prompt. Everything but attention treats a position by itself, so
    a prompt that many samples begin with is computed once. For attention alone its queries, keys
    and values are laid out in the row of every such sample, where any kernel finds them.

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
