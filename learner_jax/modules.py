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
from jax.sharding import Mesh
from jaxtyping import Array, Float

from learner_jax.execution import Execution, widen
from learner_jax.remat import layer_remat
from runspec.core.models.family import ONES, ZEROS, Initial, normal

Axes = Mapping[str, int]
"""Logical axes in order, a key of `MESH_AXES` each, and their sizes."""
M = TypeVar("M", bound=nnx.Module)


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
