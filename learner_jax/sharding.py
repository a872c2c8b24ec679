"""The mesh, what the one table `MESH_AXES` cuts by it, and how a model is computed.

data     copies of the parameters, each on its own rows
fsdp     rows too; parameters and optimizer state are cut over it
context  positions of a row
tensor   heads, MLP columns and vocabulary
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from runspec.core import schema
from runspec.core.errors import UserError
from runspec.core.models.parameters import MESH_AXES

AXES = ("data", "fsdp", "context", "tensor")
Tree = TypeVar("Tree")


def make_mesh(shape: schema.Mesh, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """The mesh of `learner.mesh` over the first of `devices`; those of this program when None.

    Axes are of type Auto: the compiler propagates shardings from the parameters and the few
    constraints in the model. Explicit axes, JAX's default, refuse the scanned layers.

    With `slices` above 1, `slice_axis` runs from slice to slice in its outer part and inside a
    slice in its inner part, so that only it crosses the slower network. Slices are those of the
    TPU; elsewhere consecutive processes, or on one process equal parts of its devices.

    Raises:
        UserError: fewer devices than the mesh needs, or slices that do not divide it.
    """
    sizes = {axis: getattr(shape, axis) for axis in AXES}
    needed, devices = shape.devices, jax.devices() if devices is None else devices
    if needed > len(devices):
        raise UserError(
            f"the mesh {sizes} needs {needed} devices, "
            f"here are {len(devices)} ({devices[0].platform})",
            place="learner.mesh",
            remedy="shrink the mesh, or on a CPU set "
            f"XLA_FLAGS=--xla_force_host_platform_device_count={needed}",
        )
    if sizes[shape.slice_axis] % shape.slices:
        raise UserError(
            f"{shape.slices} slices do not divide {shape.slice_axis} = {sizes[shape.slice_axis]}",
            place="learner.mesh.slices",
            remedy=f"make {shape.slice_axis} a multiple of it, or let another axis cross slices",
        )
    inner = sizes | {shape.slice_axis: sizes[shape.slice_axis] // shape.slices}
    parts = [
        mesh_utils.create_device_mesh(tuple(inner.values()), part, allow_split_physical_axes=True)
        for part in _slices(devices, shape.slices, needed)
    ]
    array = np.concatenate(parts, axis=AXES.index(shape.slice_axis))
    return Mesh(array, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def _slices(devices: Sequence[jax.Device], slices: int, needed: int) -> list[Sequence[jax.Device]]:
    """`needed` devices in `slices` equal parts, the closest together."""
    each = needed // slices
    by_slice: dict[int, list[jax.Device]] = {}
    for device in devices:
        by_slice.setdefault(getattr(device, "slice_index", None) or 0, []).append(device)
    if len(by_slice) == slices:
        parts = [by_slice[index] for index in sorted(by_slice)]
    else:  # JAX lists devices process by process
        parts = [list(devices[i * each : (i + 1) * each]) for i in range(slices)]
    if any(len(part) < each for part in parts):
        raise UserError(
            f"slices of {[len(part) for part in parts]} devices, the mesh needs {each} of each",
            place="learner.mesh.slices",
            remedy="slices are of one size; see learner.hardware.topology",
        )
    return [part[:each] for part in parts]


def logical_sharding(
    mesh: Mesh, shape: tuple[int, ...], axes: tuple[str | None, ...]
) -> NamedSharding:
    """Sharding of an array by the table; a dimension that its mesh axes do not divide is whole."""
    parts = (
        None if axis is None else mesh_axes(mesh, axis, size)[0]
        for size, axis in zip(shape, axes, strict=True)
    )
    return NamedSharding(mesh, PartitionSpec(*parts))


def mesh_axes(mesh: Mesh, axis: str, size: int) -> tuple[tuple[str, ...] | None, int]:
    """The mesh axes that cut a dimension of this size, and into how many parts.

    (None, 1) where the mesh does not cut that logical axis, or its parts would not be equal.
    """
    names = MESH_AXES[axis]
    parts = math.prod(mesh.shape[name] for name in names)
    return (names, parts) if parts > 1 and size % parts == 0 else (None, 1)


def constrain(x: Array, mesh: Mesh | None, *axes: str | None) -> Array:
    """`x` with its sharding fixed by the table; unchanged without a mesh."""
    if mesh is None or mesh.size == 1:
        return x
    return jax.lax.with_sharding_constraint(x, logical_sharding(mesh, x.shape, axes))


def param_shardings(abstract: Any, mesh: Mesh) -> Any:
    """Tree of NamedSharding for a tree of `Parameter` (`model.abstract_params`)."""
    return jax.tree.map(lambda spec: logical_sharding(mesh, spec.shape, spec.axes), abstract)


def shard_params(params: Any, abstract: Any, mesh: Mesh) -> Any:
    """Puts a tree of host or device arrays on the mesh, types unchanged."""
    return jax.tree.map(jax.device_put, params, param_shardings(abstract, mesh))


def batch_sharding(mesh: Mesh, shape: tuple[int, ...]) -> NamedSharding:
    """Sharding of [..., B, T] by rows and positions."""
    return logical_sharding(mesh, shape, (*[None] * (len(shape) - 2), "batch", "sequence"))


def shard_batch(batch: Tree, mesh: Mesh) -> Tree:
    """Puts host arrays [..., B, T] on the mesh; each process passes the whole batch, the same."""

    shardings = jax.tree.map(lambda array: batch_sharding(mesh, array.shape), batch)
    if mesh.is_multi_process:
        # `device_put` would first ask every process whether all have the same array.
        return jax.tree.map(
            lambda array, sharding: jax.make_array_from_callback(
                array.shape, sharding, array.__getitem__
            ),
            batch,
            shardings,
        )
    return jax.device_put(batch, shardings)


def check_packing(packing: schema.Packing, mesh: Mesh) -> None:
    """See that the rows and positions of a microbatch divide among the devices.

    Raises:
        UserError: they do not.
    """
    rows, columns = mesh.shape["data"] * mesh.shape["fsdp"], mesh.shape["context"]
    for field, size, cut in (("rows", packing.rows, rows), ("tokens", packing.tokens, columns)):
        if size % cut:
            raise UserError(
                f"{size} is not a multiple of {cut}, the devices that share them",
                place=f"learner.packing.{field}",
                remedy=f"choose a multiple of {cut}",
            )


@dataclass(frozen=True)
class Execution:
    """None of it changes the result beyond rounding."""

    compute_dtype: np.dtype | type
    """Type of activations and matrix products; norms, RoPE and softmax are computed in at least
    float32."""
    remat: schema.Remat = "none"
    """The values that a layer stores for the backward pass."""
    attention: schema.Attention = "auto"
    """The attention kernel."""
    mesh: Mesh | None = None
    """Activations are sharded over it; None leaves that to the compiler."""


def wide_dtype(dtype: np.dtype | type) -> np.dtype:
    """The type of sums over values of a type: at least float32."""
    return jnp.promote_types(dtype, jnp.float32)


def widen(x: Array) -> Array:
    """`x` in at least float32."""
    return x.astype(wide_dtype(x.dtype))


def full_float32(compute_dtype: str | np.dtype | type) -> None:
    """Makes float32 products float32 in this process, where that is the type of products.

    By default TPUs round their operands to bfloat16, and NVIDIA GPUs to TF32. Call it before
    anything is traced.
    """
    if jnp.dtype(compute_dtype) == jnp.float32:
        jax.config.update("jax_default_matmul_precision", "highest")


def execution(
    learner: schema.Learner, mesh: Mesh | None, *, remat: schema.Remat | None = None
) -> Execution:
    """As the spec says; `remat` "none" where no gradient is asked for."""
    return Execution(
        jnp.dtype(learner.compute_dtype), remat or learner.remat, learner.attention, mesh
    )
