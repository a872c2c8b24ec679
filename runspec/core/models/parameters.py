"""Parameters of a model: shapes, logical axes and the mesh axes that shard them.

The table of the model's family (`family.Row`) defines them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from runspec.core.errors import UserError
from runspec.core.models.config import ModelConfig
from runspec.core.models.family import AXES, ZEROS, Initial, Row, family, normal
from runspec.core.spec.schema import Lora, Mesh

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
"""Axes of `learner.mesh` by logical axis."""
WIDTH = {"float32": 4, "bfloat16": 2}
"""Bytes of a number, by `FloatType`."""


@dataclass(frozen=True)
class Parameter:
    """One array of the parameter tree."""

    shape: tuple[int, ...]
    axes: tuple[str, ...]
    """Logical axis of each dimension, a key of `MESH_AXES`."""
    initial: Initial = ZEROS
    inputs: int | None = None
    """Number of contracted dimensions of a layer's matrix, after the layer axis; else None."""

    @property
    def size(self) -> int:
        return prod(self.shape)

    def shard_size(self, mesh: Mesh, *, whole: str | None = None) -> int:
        """Return the elements on one device.

        A dimension that its mesh axes do not divide is not sharded.

        Args:
            mesh: the mesh that shards it.
            whole: a mesh axis over which it is gathered.
        """
        size = 1
        for length, axis in zip(self.shape, self.axes, strict=True):
            cut = prod(getattr(mesh, name) for name in MESH_AXES[axis] if name != whole)
            size *= length // cut if length % cut == 0 else length
        return size


Tree = Mapping[str, Any]
"""Nested dict of `Parameter`."""


def parameters(config: ModelConfig) -> dict[str, Any]:
    """Return the tree of a model, such as {"embed": ..., "layers": {...}, "final_norm": {...}}.

    Parameters that the config excludes are absent, and so is a tied head.
    """
    return _tree(family(config.model_type).rows(config), axis_sizes(config))


def lora_parameters(config: ModelConfig, lora: Lora) -> dict[str, Any]:
    """Return the tree of adapters: A [L, in..., rank] and B [L, rank, out...] of each target."""
    return _tree(adapter_rows(config, lora.targets), axis_sizes(config) | {"r": lora.rank})


def adapter_rows(config: ModelConfig, targets: Sequence[str]) -> list[Row]:
    """Return the rows of the adapters, two for each target, in the table's order.

    Args:
        config: shape of the base model.
        targets: matrices of a layer, such as "q" and "down".

    Raises:
        UserError: a target is not a matrix of the family.
    """
    matrices = [row for row in family(config.model_type).rows(config) if row.matrix in targets]
    if missing := set(targets) - {row.matrix for row in matrices}:
        raise UserError(
            f"{config.model_type} has no matrix {', '.join(sorted(missing))}",
            place="learner.lora.targets",
            remedy=f"choose of {', '.join(matrix_shapes(config))}",
        )
    return [adapter for row in matrices for adapter in row.adapters()]


def axis_sizes(config: ModelConfig) -> dict[str, int]:
    """Return the size of every axis of the tables by its letter."""
    return {letter: getattr(config, field) for letter, (_, field) in AXES.items()}


def matrix_shapes(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """Return [in, out] of each matrix of a layer by its name, such as "q"."""
    sizes = axis_sizes(config)
    shapes = {}
    for row in family(config.model_type).rows(config):
        if row.matrix is not None:
            out, into = (_product(axes, sizes) for axes in row.tensor_axes())
            shapes[row.matrix] = into, out
    return shapes


def _tree(rows: Sequence[Row], sizes: Mapping[str, int]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for row in rows:
        node = tree
        for key in row.path[:-1]:
            node = node.setdefault(key, {})
        axes = row.tree.split()
        fan_in = _product(row.tensor_axes()[-1], sizes)
        node[row.path[-1]] = Parameter(
            tuple(sizes[axis] for axis in axes),
            tuple("rank" if axis == "r" else AXES[axis][0] for axis in axes),
            Initial(row.mean, normal(fan_in, row.gain).std),
            len(row.tensor_axes()[-1].split()) if row.matrix else None,
        )
    return tree


def _product(axes: str, sizes: Mapping[str, int]) -> int:
    return prod(sizes[axis] for axis in axes.split())


def leaves(tree: Tree) -> Iterator[Parameter]:
    """Iterate over the arrays of a tree."""
    for node in tree.values():
        if isinstance(node, Parameter):
            yield node
        else:
            yield from leaves(node)


def shard_elements(tree: Tree, mesh: Mesh, *, whole: str | None = None) -> int:
    """Return the elements of a tree on one device, as `Parameter.shard_size`."""
    return sum(leaf.shard_size(mesh, whole=whole) for leaf in leaves(tree))


def parameter_count(config: ModelConfig) -> int:
    """Return the exact number of parameters of a model; a tied head counts once."""
    return sum(leaf.size for leaf in leaves(parameters(config)))


def trained_parameters(config: ModelConfig, lora: Lora | None) -> dict[str, Any]:
    """Return the tree of the trained parameters: the model's, or the adapters'."""
    return parameters(config) if lora is None else lora_parameters(config, lora)


def trained_count(config: ModelConfig, lora: Lora | None) -> int:
    """Return the number of trained parameters: all, or those of the adapters."""
    return sum(leaf.size for leaf in leaves(trained_parameters(config, lora)))
