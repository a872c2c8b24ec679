"""The parts that policies are made of: flax `nnx` modules, made without values.

A module describes its parameters: each `nnx.Param` carries its shape, logical axes and initial
values. `learner_jax.model` puts arrays in their places, inside `jit`. Letters: B rows, T positions,
D hidden size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax import checkpoint_policies as policies
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh
from jaxtyping import Array, Float

from learner_jax.attention.xla import SAVED
from learner_jax.sharding import Execution, widen
from runspec.core import schema
from runspec.core.models.family import ONES, ZEROS, Initial, normal

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
