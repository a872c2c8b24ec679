"""The policy: the `nnx` modules that families are made of, and the trees of arrays of one model.

A module describes its parameters, without values: each `nnx.Param` carries its shape, logical axes
and initial values. It is split once: its structure, and the `Parameter`s from which initial values,
shardings and restores follow. Every program takes a pure nested dict of arrays, which
`bridge.weight_map` maps to Hugging Face names, and binds it to the structure while it is traced:

    policy = bind(config, params)
    hidden = policy(tokens, segment_ids, positions, execution)
    logits = hidden @ policy.head_weight()

Low-rank adapters (LoRA, arXiv 2106.09685) are a second, small tree beside frozen weights. A matrix
W of a layer, seen as [in, out], becomes W + (alpha / rank) A B with A [in, rank] and B [rank, out],
of which A and B are trained. B starts at zero, so a run starts at its base model. `Linear`
computes the sum. Its `Adapter` parameters are the tree: beside a weight [L, D, H, h] stand
a [L, D, r] and b [L, r, H, h], stacked and cut over the mesh as the weight is.

Letters: B rows, T positions, D hidden size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from importlib.metadata import EntryPoint
from math import prod
from typing import Any, Protocol, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import checkpoint_policies as policies
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from learner_jax.attention.xla import SAVED
from learner_jax.packing import Rows, Spans
from learner_jax.sharding import Execution, widen
from runspec.core import schema
from runspec.core.models import ModelConfig
from runspec.core.models.family import (
    MODELS_GROUP,
    ONES,
    ZEROS,
    Initial,
    family,
    load_named,
    normal,
)
from runspec.core.models.parameters import Parameter

Body = Callable[[Any, Any], tuple[Any, Any]]
LAYER_INPUT = "layer_input"

_POLICIES: dict[schema.Remat, Callable[..., Any]] = {
    # Attention's own products have batch dimensions: scores, T x T, are not kept.
    "dots": policies.save_from_both_policies(
        policies.dots_with_no_batch_dims_saveable, policies.save_only_these_names(SAVED)
    ),
    "attention": policies.save_only_these_names(SAVED),
    "full": policies.nothing_saveable,
    "offload": policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=[LAYER_INPUT],
        offload_src="device",
        offload_dst="pinned_host",
    ),
}
Axes = Mapping[str, int]
"""Logical axes in order, a key of `MESH_AXES` each, and their sizes."""
M = TypeVar("M", bound=nnx.Module)


def layer_remat(body: Body, remat: schema.Remat) -> Body:
    """Return the body of a scan over layers, (x, layer) -> (x, None), under `remat`.

    `learner.remat` names what a layer stores from the forward pass for the backward pass:

        none        everything
        dots        the results of its matrix products, and the output of attention
        attention   its input, and the output and log-sum-exp of attention
        full        its input
        offload     its input, in the host's memory

    The backward pass computes the rest again from the layer's input.
    """
    if remat == "none":
        return body

    def named(x: Any, layer: Any) -> tuple[Any, Any]:
        return body(checkpoint_name(x, LAYER_INPUT), layer)

    # A scan's body is not merged with another: nothing has to prevent it.
    return jax.checkpoint(named, prevent_cse=False, policy=_POLICIES[remat])


class Adapter(nnx.Param):
    """A parameter of a low-rank adapter, which is trained in place of the others."""


def param(
    initial: Initial,
    axes: Axes,
    kind: type[nnx.Param] = nnx.Param,
    *,
    inputs: int | None = None,
) -> nnx.Param:
    """A parameter without values: its initial values, and the size of each logical axis.

    `inputs` is how many of the axes a matrix contracts, from the first; None for others.
    """
    shape = jax.ShapeDtypeStruct(tuple(axes.values()), jnp.float32)
    return kind(shape, initial=initial, axes=tuple(axes), inputs=inputs)


class RMSNorm(nnx.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimensions, in at least float32."""

    def __init__(self, axes: Axes, eps: float) -> None:
        self.eps = eps
        self.weight = param(ONES, axes)

    def __call__(self, x: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
        weight, wide = self.weight[...], widen(x)
        over = tuple(range(-weight.ndim, 0))
        mean = jnp.mean(jnp.square(wide), axis=over, keepdims=True)
        # Rounded before the weight, as transformers and vLLM do.
        return weight.astype(x.dtype) * (wide * jax.lax.rsqrt(mean + self.eps)).astype(x.dtype)


class Linear(nnx.Module):
    """x W, plus a bias and a low-rank adapter where it has them.

    Args:
        inputs: size of each logical axis that is contracted.
        outputs: size of each logical axis of the result.
        gain: of the weight's initial values (`family.normal`).
        bias: whether it has one.
    """

    def __init__(
        self,
        inputs: Axes,
        outputs: Axes,
        *,
        gain: float = 1.0,
        bias: bool = False,
    ) -> None:
        self.contracted = len(inputs)
        fan_in = math.prod(inputs.values())
        self.weight = param(normal(fan_in, gain), {**inputs, **outputs}, inputs=len(inputs))
        # A vector of the hidden size is whole on every device.
        vector = {"norm" if axis == "embed" else axis: size for axis, size in outputs.items()}
        self.bias = param(ZEROS, vector) if bias else None
        self.a: nnx.Param | None = nnx.data(None)
        self.b: nnx.Param | None = nnx.data(None)
        self.scale = 0.0

    def add_adapter(self, rank: int, alpha: float) -> None:
        """Adds (alpha / rank) (x A) B, by default nothing: B starts at 0 (arXiv 2106.09685).

        Args:
            rank: columns of A [in..., rank] and rows of B [rank, out...].
            alpha: numerator of the scale.
        """
        sizes = dict(zip(self.weight.axes, self.weight.shape, strict=True))
        stacked = {"layers": sizes.pop("layers")} if "layers" in sizes else {}
        inputs = dict(list(sizes.items())[: self.contracted])
        outputs = dict(list(sizes.items())[self.contracted :])
        drawn = normal(math.prod(inputs.values()), gain=3**-0.5)
        self.a = param(drawn, {**stacked, **inputs, "rank": rank}, Adapter, inputs=len(inputs))
        self.b = param(ZEROS, {**stacked, "rank": rank, **outputs}, Adapter, inputs=1)
        self.scale = alpha / rank

    def __call__(self, x: Float[Array, "B T ..."], mesh: Mesh | None) -> Float[Array, "B T ..."]:
        product = _dense(x, self.weight[...], mesh, self.contracted)
        if self.bias is not None:
            product = product + self.bias[...]
        if self.a is not None and self.b is not None:
            inner = _dense(x, self.a[...], mesh, self.contracted)
            product = product + self.scale * _dense(inner, self.b[...], mesh)
        return product


def _dense(
    x: Float[Array, "B T ..."], weight: Array, mesh: Mesh | None, contract: int = 1
) -> Float[Array, "B T ..."]:
    """Contracts the last `contract` dimensions of x with the first ones of the weight.

    As a product of two matrices: the weight's gradient then sums over one dimension, which XLA
    for CPUs does without a transposed copy of x, twice as fast. Not where columns are cut: rows
    and columns in one dimension could not stay so.
    """
    if mesh is not None and mesh.shape["context"] > 1:
        return jnp.tensordot(x, weight, axes=contract)
    rows, inner = x.shape[:-contract], math.prod(weight.shape[:contract])
    product = x.reshape(-1, inner) @ weight.reshape(inner, -1)
    return product.reshape(*rows, *weight.shape[contract:])


def stacked(layer: M, count: int) -> M:
    """The layer with every parameter stacked `count` times on a new axis 0, "layers"."""
    for _, node in nnx.iter_graph(layer):
        if isinstance(node, nnx.Param):
            shape = jax.ShapeDtypeStruct((count, *node.shape), node.dtype)
            node.set_value(shape)
            node.set_metadata(axes=("layers", *node.axes))
    return layer


def scan_layers(
    layers: M,
    call: Callable[[M, Float[Array, "B T D"]], Float[Array, "B T D"]],
    x: Float[Array, "B T D"],
    execution: Execution,
) -> Float[Array, "B T D"]:
    """x after all layers of a `stacked` module, each called as `call(layer, x)`.

    A layer's parameters are cast to `execution.compute_dtype`; `execution.remat` says what it keeps
    for the backward pass.
    """
    graph, parameters = nnx.split(layers)

    def body(x: Array, layer: Any) -> tuple[Array, None]:
        # Cast here, a layer at a time: before the scan it would be a second copy of the model.
        layer = jax.tree.map(lambda leaf: leaf.astype(execution.compute_dtype), layer)
        return call(nnx.merge(graph, layer), x), None

    return jax.lax.scan(layer_remat(body, execution.remat), x, nnx.to_pure_dict(parameters))[0]


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
        shared: Rows | Spans | None = None,
        /,
    ) -> Float[Array, "B T D"]:
        """Hidden states after the last norm, from which `head_weight` makes logits.

        Args:
            tokens: ids in [0, V).
            segment_ids: 1, 2, ... for the samples of a row, 0 for padding; read by attention where
                nothing is shared.
            positions: of each token in its own sample, from 0.
            execution: kernels, types and mesh.
            shared: what each token sees where samples share prompts.

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


def init_params(config: ModelConfig, key: Array) -> dict[str, Any]:
    """Draw initial parameters, float32 (float64 under `jax_enable_x64`), in main memory.

    They are drawn on the CPU, so that they depend on no mesh and a device need not hold them.
    """
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        return _init_params(config, key)


@partial(jax.jit, static_argnames="config")
def _init_params(config: ModelConfig, key: Array) -> dict[str, Any]:
    return draw(abstract_params(config), key)


MOST_DRAWN = 2**28
"""Numbers of one draw, which JAX holds as bits and as floats; a larger tree is drawn in parts."""


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
    found: list[list[Array]] = [[] for _ in paths]
    for number, parts in enumerate(_draws([leaf.shape for leaf in leaves])):
        # Cut up: a draw for each leaf takes ten times as long to compile.
        ends = np.cumsum([prod(shape) for _, shape in parts]).tolist()
        own = jax.random.fold_in(key, MOST_DRAWN + number) if number else key
        values = jnp.split(jax.random.normal(own, (ends[-1],)), ends[:-1])
        for (at, shape), part in zip(parts, values, strict=True):
            initial = leaves[at].initial
            found[order[at]].append(initial.mean + initial.std * part.reshape(shape))
    return jax.tree.unflatten(tree, [p[0] if len(p) == 1 else jnp.concatenate(p) for p in found])


def _draws(shapes: Sequence[tuple[int, ...]]) -> list[list[tuple[int, tuple[int, ...]]]]:
    """Divide arrays into draws of at most `MOST_DRAWN` numbers, larger ones along their first axis.

    Returns:
        for each draw its parts, in order: the array's number and the part's shape.
    """
    draws, left = [list[tuple[int, tuple[int, ...]]]()], MOST_DRAWN
    for number, (rows, *rest) in enumerate(shapes):
        most = max(1, min(rows, MOST_DRAWN // prod(rest)))
        for first in range(0, rows, most):
            part = (min(most, rows - first), *rest)
            if prod(part) > left and draws[-1]:
                draws.append([])
                left = MOST_DRAWN
            draws[-1].append((number, part))
            left -= prod(part)
    return draws


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
