"""The mesh, and the one table from logical axes to mesh axes.

data     copies of the parameters, each on its own rows
fsdp     rows too; parameters and optimizer state are cut over it
context  positions of a row
tensor   heads, MLP columns and vocabulary
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from runspec.common.errors import UserError
from runspec.spec import schema

AXES = ("data", "fsdp", "context", "tensor")
MESH_AXES: dict[str, tuple[str, ...]] = {
    "batch": ("data", "fsdp"),
    "sequence": ("context",),
    "shard": ("data", "fsdp", "context"),
    "layers": (),
    "vocab": ("tensor",),
    "embed": ("fsdp",),
    "norm": (),
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "head_dim": (),
    "mlp": ("tensor",),
    "rank": (),
}
Tree = TypeVar("Tree")


def make_mesh(shape: schema.Mesh, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """The mesh of `learner.mesh` over the first of `devices`; those of this program when None.

    Axes are of type Auto: the compiler propagates shardings from the parameters and the few
    constraints in the model. Explicit axes, JAX's default, refuse the scanned layers.

    Raises:
        UserError: fewer devices than the mesh needs.
    """
    sizes = tuple(getattr(shape, axis) for axis in AXES)
    needed, devices = math.prod(sizes), jax.devices() if devices is None else devices
    if needed > len(devices):
        raise UserError(
            f"the mesh {dict(zip(AXES, sizes, strict=True))} needs {needed} devices, "
            f"here are {len(devices)} ({devices[0].platform})",
            place="learner.mesh",
            remedy="shrink the mesh, or on a CPU set "
            f"XLA_FLAGS=--xla_force_host_platform_device_count={needed}",
        )
    return jax.make_mesh(
        sizes, AXES, axis_types=(AxisType.Auto,) * len(AXES), devices=devices[:needed]
    )


def logical_sharding(
    mesh: Mesh, shape: tuple[int, ...], axes: tuple[str | None, ...]
) -> NamedSharding:
    """Sharding of an array by the table; a dimension that its mesh axes do not divide is whole."""
    parts: list[tuple[str, ...] | None] = []
    for size, axis in zip(shape, axes, strict=True):
        names = MESH_AXES[axis] if axis is not None else ()
        cut = math.prod(mesh.shape[name] for name in names)
        parts.append(names if cut > 1 and size % cut == 0 else None)
    return NamedSharding(mesh, PartitionSpec(*parts))


def constrain(x: Array, mesh: Mesh | None, *axes: str | None) -> Array:
    """`x` with its sharding fixed by the table; unchanged without a mesh."""
    if mesh is None or mesh.size == 1:
        return x
    return jax.lax.with_sharding_constraint(x, logical_sharding(mesh, x.shape, axes))


def param_shardings(abstract: Any, mesh: Mesh) -> Any:
    """Tree of NamedSharding for a tree of `model.ParamSpec` (`model.abstract_params`)."""
    return jax.tree.map(lambda spec: logical_sharding(mesh, spec.shape, spec.axes), abstract)


def shard_params(params: Any, abstract: Any, mesh: Mesh) -> Any:
    """Puts a tree of host or device arrays on the mesh, types unchanged."""
    return jax.tree.map(jax.device_put, params, param_shardings(abstract, mesh))


def shard_batch(batch: Tree, mesh: Mesh) -> Tree:
    """Puts host arrays [B, T] on the mesh. Every process passes the whole batch."""

    def put(array: np.ndarray) -> Array:
        return jax.device_put(array, logical_sharding(mesh, array.shape, ("batch", "sequence")))

    return jax.tree.map(put, batch)
