"""The parameters of a model, by shape and by the mesh axes that cut them.

What is said here is what `learner_jax.model` makes and `learner_jax.sharding` cuts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from runspec.core.models.config import ModelConfig
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
"""From logical axes to the axes of `learner.mesh`."""
WIDTH = {"float32": 4, "bfloat16": 2}
"""Bytes of a number, by `FloatType`."""
CONTRACTED = {"o": 2}
"""Dimensions of a layer's matrix that are its input, where there is more than one."""


def is_matrix(name: str, dimensions: int) -> bool:
    """Whether a leaf of `layers` is a stack of matrices: neither norms nor biases."""
    return dimensions > 2 and not name.endswith("_bias")


@dataclass(frozen=True)
class Parameter:
    """One array of the tree."""

    shape: tuple[int, ...]
    axes: tuple[str, ...]
    """Logical axis of each dimension, a key of `MESH_AXES`."""

    @property
    def size(self) -> int:
        return prod(self.shape)

    def shard_size(self, mesh: Mesh, *, whole: str | None = None) -> int:
        """Elements on one device. A dimension that its mesh axes do not divide is whole.

        Args:
            mesh: that cuts it.
            whole: a mesh axis over which it is gathered.
        """
        size = 1
        for length, axis in zip(self.shape, self.axes, strict=True):
            cut = prod(getattr(mesh, name) for name in MESH_AXES[axis] if name != whole)
            size *= length // cut if length % cut == 0 else length
        return size


Tree = Mapping[str, Any]
"""Nested dict of `Parameter`: {"embed": ..., "layers": {...}, "final_norm": ..., "head": ...}."""


def parameters(config: ModelConfig) -> dict[str, Any]:
    """The tree; absent is what the config does not have, and a tied `head`.

    The layers are stacked on axis 0. Letters: D hidden size, H query heads, K key/value heads,
    h head size, F MLP size, L layers, V vocabulary. q [L, D, H, h], k and v [L, D, K, h],
    o [L, H, h, D], gate and up [L, D, F], down [L, F, D], embed [V, D], head [D, V].
    """
    d, f, v = config.hidden_size, config.intermediate_size, config.vocab_size
    heads, kv_heads, h = config.num_attention_heads, config.num_key_value_heads, config.head_dim

    def layer(axes: tuple[str, ...], *shape: int) -> Parameter:
        return Parameter((config.num_hidden_layers, *shape), ("layers", *axes))

    query, key_value = ("heads", "head_dim"), ("kv_heads", "head_dim")
    layers = {
        "attn_norm": layer(("norm",), d),
        "q": layer(("embed", *query), d, heads, h),
        "k": layer(("embed", *key_value), d, kv_heads, h),
        "v": layer(("embed", *key_value), d, kv_heads, h),
        "o": layer((*query, "embed"), heads, h, d),
        "mlp_norm": layer(("norm",), d),
        "gate": layer(("embed", "mlp"), d, f),
        "up": layer(("embed", "mlp"), d, f),
        "down": layer(("mlp", "embed"), f, d),
    }
    if config.qkv_bias:
        layers["q_bias"] = layer(query, heads, h)
        layers["k_bias"] = layers["v_bias"] = layer(key_value, kv_heads, h)
    if config.output_bias:
        layers["o_bias"] = layer(("norm",), d)
    if config.qk_norm:
        layers["q_norm"] = layers["k_norm"] = layer(("norm",), h)
    tree: dict[str, Any] = {
        "embed": Parameter((v, d), ("vocab", "embed")),
        "layers": layers,
        "final_norm": Parameter((d,), ("norm",)),
    }
    if not config.tie_word_embeddings:
        tree["head"] = Parameter((d, v), ("embed", "vocab"))
    return tree


def lora_parameters(config: ModelConfig, lora: Lora) -> dict[str, Any]:
    """The tree of the adapters: of each target `<target>_a` [L, in..., rank] and `<target>_b`
    [L, rank, out...]."""
    base = parameters(config)["layers"]
    layers: dict[str, Parameter] = {}
    for target in lora.targets:
        matrix, inner = base[target], 1 + CONTRACTED.get(target, 1)
        layers[f"{target}_a"] = Parameter(
            (*matrix.shape[:inner], lora.rank), (*matrix.axes[:inner], "rank")
        )
        layers[f"{target}_b"] = Parameter(
            (matrix.shape[0], lora.rank, *matrix.shape[inner:]),
            (matrix.axes[0], "rank", *matrix.axes[inner:]),
        )
    return {"layers": layers}


def leaves(tree: Tree) -> Iterator[Parameter]:
    """Every array of a tree."""
    for node in tree.values():
        if isinstance(node, Parameter):
            yield node
        else:
            yield from leaves(node)


def shard_elements(tree: Tree, mesh: Mesh, *, whole: str | None = None) -> int:
    """Elements of a tree on one device, as `Parameter.shard_size`."""
    return sum(leaf.shard_size(mesh, whole=whole) for leaf in leaves(tree))


def parameter_count(config: ModelConfig) -> int:
    """Parameters of the model, exactly; a tied head is the embedding and counts once."""
    return sum(leaf.size for leaf in leaves(parameters(config)))


def trained_parameters(config: ModelConfig, lora: Lora | None) -> dict[str, Any]:
    """The tree of what is trained: the model's, or the adapters'."""
    return parameters(config) if lora is None else lora_parameters(config, lora)


def trained_count(config: ModelConfig, lora: Lora | None) -> int:
    """Parameters that are trained: all, or those of the adapters."""
    return sum(leaf.size for leaf in leaves(trained_parameters(config, lora)))
