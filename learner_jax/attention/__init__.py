"""Causal attention inside the segments of packed rows, by the kernel that suits the platform.

splash    TPUs
cudnn     NVIDIA GPUs, in bfloat16 or float16
xla       everywhere, in any type
"""

from __future__ import annotations

from functools import partial

import jax
import numpy as np
from jaxtyping import Array, Float, Int

from learner_jax.attention import cudnn, splash, xla
from learner_jax.attention.context import Kernel, attend_on_mesh, context_shards
from learner_jax.attention.xla import SAVED
from learner_jax.execution import Execution
from runspec.core.errors import UserError
from runspec.core.spec import schema

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
    refusal = refusals[name]
    if refusal is not None:
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
