"""Trees of arrays, their adapters, and the `nnx` module of a model family that computes with them.

A module is split once, without values: its structure, and the `Parameter`s from which initial
values, shardings and restores follow. Every program takes a pure nested dict of arrays, which
`bridge.weight_map` maps to Hugging Face names, and binds it to the structure while it is traced:

    policy = bind(config, params)
    hidden = policy(tokens, segment_ids, positions, execution)
    logits = hidden @ policy.head_weight()

Low-rank adapters (LoRA, arXiv 2106.09685) are a second, small tree beside frozen weights. A matrix
W of a layer, seen as [in, out], becomes W + (alpha / rank) A B with A [in, rank] and B [rank, out],
of which A and B are trained. B starts at zero, so a run starts at its base model. `modules.Linear`
computes the sum. Its `Adapter` parameters are the tree: beside a weight [L, D, H, h] stand
a [L, D, r] and b [L, r, H, h], stacked and cut over the mesh as the weight is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, partial
from importlib.metadata import EntryPoint
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from learner_jax.attention import Rows
from learner_jax.modules import Adapter, Linear
from learner_jax.sharding import Execution, widen
from runspec.core import schema
from runspec.core.models.config import ModelConfig
from runspec.core.models.family import MODELS_GROUP, family, load_named
from runspec.core.models.parameters import Parameter

Params = Mapping[str, Any]
"""Nested dict of arrays, by the names of the module's attributes."""


class Policy(Protocol):
    """Interface of a family's module. B rows, T positions, D hidden size, V vocabulary."""

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        segment_ids: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        execution: Execution,
        rows: Rows | None = None,
        /,
    ) -> Float[Array, "B T D"]:
        """Hidden states after the last norm, from which `head_weight` makes logits.

        Args:
            tokens: ids in [0, V).
            segment_ids: 1, 2, ... for the samples of a row, 0 for padding.
            positions: of each token in its own sample, from 0.
            execution: kernels, types and mesh.
            rows: where the tokens stand for attention, with `segment_ids` of those rows; None where
                they are packed in rows themselves.

        Returns:
            [B, T, D] in `execution.compute_dtype`. Padding positions hold finite values that mean
            nothing.
        """

    def head_weight(self) -> Float[Array, "D V"]:
        """The output head, the transposed embedding where it is tied; in the type it is stored
        in."""


@dataclass(frozen=True)
class _Split:
    """A family's module for one config, without values."""

    structure: nnx.GraphDef[Any]
    weights: dict[str, Any]
    """Nested dict of `Parameter`."""
    adapters: dict[str, Any]


@cache
def _split(config: ModelConfig, rank: int, alpha: float, targets: tuple[str, ...]) -> _Split:
    point = EntryPoint(config.model_type, family(config.model_type).module, MODELS_GROUP)
    module = load_named(point, type)(config)
    for path, node in list(nnx.iter_graph(module)):
        if isinstance(node, Linear) and path[-1] in targets:
            node.add_adapter(rank, alpha)
    structure, *states = nnx.split(module, Adapter, ...)

    def described(state: Any) -> dict[str, Any]:
        return nnx.to_pure_dict(
            nnx.map_state(lambda _, v: Parameter(v.shape, v.axes, v.initial, v.inputs), state)
        )

    adapters, weights = map(described, states)
    return _Split(structure, weights, adapters)


def split(config: ModelConfig, lora: schema.Lora | None = None) -> _Split:
    """The module of a model, split into its structure and what describes its parameters.

    Raises:
        UserError: the family's module cannot be loaded.
    """
    if lora is None:
        return _split(config, 0, 0.0, ())
    return _split(config, lora.rank, lora.alpha, tuple(sorted(lora.targets)))


def bind(config: ModelConfig, *trees: Params, lora: schema.Lora | None = None) -> Policy:
    """The module with its arrays, for use inside a traced function.

    Args:
        config: the shape.
        trees: the weights, and with `lora` the adapters too; in any type, cast to
            `Execution.compute_dtype` on use.
        lora: rank, scale and targets of the adapters.
    """
    return nnx.merge(split(config, lora).structure, *trees)


def abstract_params(config: ModelConfig) -> dict[str, Any]:
    """The tree of `Parameter` of a model's weights."""
    return split(config).weights


@partial(jax.jit, static_argnames="config")
def init_params(config: ModelConfig, key: Array) -> dict[str, Any]:
    """Draws initial parameters, float32 (float64 under `jax_enable_x64`)."""
    return draw(abstract_params(config), key)


def draw(abstract: Any, key: Array) -> Any:
    """Draws the arrays of a tree of `Parameter`."""
    paths, tree = jax.tree.flatten_with_path(abstract)

    def place(number: int) -> tuple[Any, ...]:
        # By the tree's part, the parameter's module, and a weight before its bias; whatever module
        # of a layer holds it: values outlive a change of modules.
        names = [entry.key for entry in paths[number][0]]
        return names[0], names[-2:-1], names[-1] == "bias", names[-1]

    order = sorted(range(len(paths)), key=place)
    leaves = [paths[number][1] for number in order]
    # One draw, cut up: a draw for each leaf takes ten times as long to compile.
    ends = np.cumsum([leaf.size for leaf in leaves]).tolist()
    parts = jnp.split(jax.random.normal(key, (ends[-1],)), ends[:-1])
    drawn = {
        number: leaf.initial.mean + leaf.initial.std * part.reshape(leaf.shape)
        for number, leaf, part in zip(order, leaves, parts, strict=True)
    }
    return jax.tree.unflatten(tree, [drawn[number] for number in range(len(paths))])


def abstract_lora(config: ModelConfig, lora: schema.Lora) -> dict[str, Any]:
    """Return the tree of the adapters' `Parameter`s."""
    return split(config, lora).adapters


def init_lora(config: ModelConfig, lora: schema.Lora, key: Array) -> dict[str, Any]:
    """Draw adapters, float32 (float64 under `jax_enable_x64`), a function of the key.

    The numbers differ from those that `init_params` draws from the same key.
    """
    return draw(abstract_lora(config, lora), jax.random.fold_in(key, 1))


def merge_lora(
    base: Params, lora_params: Params, lora: schema.Lora, dtype: np.dtype | type | None = None
) -> dict[str, Any]:
    """Return the plain parameters W + (alpha / rank) A B, which engines without adapters read.

    The sum is taken in at least float32, a layer at a time.

    Args:
        base: the frozen tree.
        lora_params: as `abstract_lora`.
        lora: rank and alpha.
        dtype: of the merged matrices; by default that of the sum. Others keep the base's type.
    """

    def one_layer(parts: tuple[Array, Array, Array]) -> Array:
        weight, a, b = parts
        delta = jnp.tensordot(widen(a), widen(b), axes=1, precision=jax.lax.Precision.HIGHEST)
        total = widen(weight) + (lora.alpha / lora.rank) * delta
        return total.astype(dtype or total.dtype)

    def merged(weights: Params, adapters: Params) -> dict[str, Any]:
        if "a" in adapters:
            parts = weights["weight"], adapters["a"], adapters["b"]
            return {**weights, "weight": jax.lax.map(one_layer, parts)}
        # Sorted: the same program in every process.
        return {**weights, **{k: merged(weights[k], adapters[k]) for k in sorted(adapters)}}

    return merged(base, lora_params)
