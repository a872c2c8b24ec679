"""A decoder as pure functions over a nested dict of arrays: Qwen2, Qwen3, Llama and Mistral shapes.

`abstract_params` describes the parameters: shapes, logical axes and initial scales. Initialisation,
shardings and restores follow from it. The layers are stacked on axis 0 and scanned. Letters: B
rows, T positions, D hidden size, H query heads, K key/value heads, h head size, F MLP size, L
layers, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from learner_jax.attention import packed_attention
from learner_jax.attention.context import from_zigzag, to_zigzag
from learner_jax.attention.rows import Rows, attend_in_rows
from learner_jax.embedding import embed
from learner_jax.execution import Execution, widen
from learner_jax.remat import layer_remat
from learner_jax.rope import Rotation, rotate, rotation
from learner_jax.sharding import constrain
from runspec.core.models.config import ModelConfig
from runspec.core.models.parameters import CONTRACTED, Parameter, parameters

Params = Mapping[str, Any]
"""Nested dict of arrays, the tree that `bridge.weight_map` maps to Hugging Face names."""
OUTPUT_SCALE = 0.1
"""Factor on the initial scale of matrices that write to the residual stream."""


@dataclass(frozen=True)
class ParamSpec:
    """One array of the tree before it exists."""

    shape: tuple[int, ...]
    axes: tuple[str, ...]
    """Logical axis of each dimension, a key of `MESH_AXES`."""
    std: float = 0.0
    """Initial values are mean + std * normal."""
    mean: float = 0.0


def abstract_params(config: ModelConfig) -> dict[str, Any]:
    """The tree of `ParamSpec`, as `runspec.core.models.parameters` has it.

    Initial scales: embedding 1/sqrt(D), matrices 1/sqrt(fan-in), `o` and `down` a tenth of that,
    norms 1, biases 0.
    """
    width, mixed = config.hidden_size, config.num_attention_heads * config.head_dim
    stds = dict.fromkeys(("embed", "q", "k", "v", "gate", "up", "head"), width**-0.5)
    stds |= {"o": OUTPUT_SCALE * mixed**-0.5, "down": OUTPUT_SCALE * config.intermediate_size**-0.5}

    def drawn(name: str, parameter: Parameter) -> ParamSpec:
        mean = 1.0 if name.endswith("norm") else 0.0
        return ParamSpec(parameter.shape, parameter.axes, stds.get(name, 0.0), mean)

    tree = parameters(config)
    layers = {name: drawn(name, leaf) for name, leaf in tree.pop("layers").items()}
    return {"layers": layers} | {name: drawn(name, leaf) for name, leaf in tree.items()}


@partial(jax.jit, static_argnames="config")
def init_params(config: ModelConfig, key: Array) -> dict[str, Any]:
    """Draws initial parameters, float32 (float64 under `jax_enable_x64`)."""
    return draw(abstract_params(config), key)


def draw(abstract: Any, key: Array) -> Any:
    """Draws the arrays of a tree of `ParamSpec`."""
    specs, tree = jax.tree.flatten(abstract)
    # One draw, cut up: a draw for each leaf takes ten times as long to compile.
    ends = np.cumsum([math.prod(spec.shape) for spec in specs]).tolist()
    parts = jnp.split(jax.random.normal(key, (ends[-1],)), ends[:-1])
    leaves = [
        spec.mean + spec.std * part.reshape(spec.shape)
        for spec, part in zip(specs, parts, strict=True)
    ]
    return jax.tree.unflatten(tree, leaves)


def head_weight(params: Params) -> Float[Array, "D V"]:
    """The output head, the transposed embedding where it is tied; in the type it is stored in."""
    return params["head"] if "head" in params else params["embed"].T


def final_hidden(
    params: Params,
    config: ModelConfig,
    tokens: Int[Array, "B T"],
    segment_ids: Int[Array, "B T"],
    positions: Int[Array, "B T"],
    execution: Execution,
    rows: Rows | None = None,
) -> Float[Array, "B T D"]:
    """Hidden states after the last norm, from which `head_weight` makes logits.

    Args:
        params: in any type; cast to `execution.compute_dtype` on use.
        config: the shape.
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
    mesh, compute_dtype = execution.mesh, execution.compute_dtype
    # Under context parallelism the columns are in another order in here, and nowhere else.
    tokens, segment_ids, positions = (to_zigzag(x, mesh) for x in (tokens, segment_ids, positions))
    x = embed(params["embed"], tokens, execution)  # [B, T, D]
    x = constrain(x, mesh, "batch", "sequence", None)
    turn = rotation(positions, config)

    def body(x: Array, layer: Params) -> tuple[Array, None]:
        # Cast here, a layer at a time: before the scan it would be a second copy of the model.
        layer = jax.tree.map(lambda leaf: leaf.astype(compute_dtype), layer)
        return _layer(x, layer, config, segment_ids, turn, execution, rows), None

    x, _ = jax.lax.scan(layer_remat(body, execution.remat), x, params["layers"])
    x = _rms_norm(x, params["final_norm"].astype(compute_dtype), config.rms_norm_eps)
    return from_zigzag(x, mesh)


def _layer(
    x: Float[Array, "B T D"],
    layer: Params,
    config: ModelConfig,
    segment_ids: Int[Array, "B T"],
    turn: Rotation,
    execution: Execution,
    rows: Rows | None,
) -> Float[Array, "B T D"]:
    y = _rms_norm(x, layer["attn_norm"], config.rms_norm_eps)  # [B, T, D]
    mesh = execution.mesh
    q, k = _linear(y, layer, "q", mesh), _linear(y, layer, "k", mesh)  # [B, T, H, h], [B, T, K, h]
    if "q_norm" in layer:
        q = _rms_norm(q, layer["q_norm"], config.rms_norm_eps)
        k = _rms_norm(k, layer["k_norm"], config.rms_norm_eps)
    q, k, v = rotate(q, turn), rotate(k, turn), _linear(y, layer, "v", mesh)
    if rows is None:
        mixed = packed_attention(q, k, v, segment_ids, execution)
    else:
        mixed = attend_in_rows(q, k, v, segment_ids, rows, execution)
    x = x + _linear(mixed, layer, "o", mesh)  # [B, T, D]
    x = constrain(x, mesh, "batch", "sequence", None)
    y = _rms_norm(x, layer["mlp_norm"], config.rms_norm_eps)  # [B, T, D]
    gate, up = _linear(y, layer, "gate", mesh), _linear(y, layer, "up", mesh)
    gated = jax.nn.silu(gate) * up  # [B, T, F]
    return constrain(x + _linear(gated, layer, "down", mesh), mesh, "batch", "sequence", None)


def _linear(
    x: Float[Array, "B T ..."], layer: Params, name: str, mesh: Mesh | None
) -> Float[Array, "B T ..."]:
    """x W, plus the bias and the adapter (`lora.with_adapters`) where the layer has one."""
    contract = CONTRACTED.get(name, 1)
    product = _dense(x, layer[name], mesh, contract)
    if f"{name}_bias" in layer:
        product = product + layer[f"{name}_bias"]
    if f"{name}_a" in layer:
        inner = _dense(x, layer[f"{name}_a"], mesh, contract)
        product = product + _dense(inner, layer[f"{name}_b"], mesh)
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


def _rms_norm(
    x: Float[Array, "*B D"], weight: Float[Array, " D"], eps: float
) -> Float[Array, "*B D"]:
    wide = widen(x)
    wide = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)
    # Rounded before the weight, as transformers and vLLM do.
    return weight * wide.astype(x.dtype)
