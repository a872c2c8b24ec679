"""A Qwen2 decoder as pure functions over a nested dict of arrays.

`abstract_params` is the one description of the parameters: shapes, logical axes and initial
scales. Initialisation, shardings and restores follow from it. The layers are stacked on axis 0 and
scanned. Letters: B rows, T positions, D hidden size, H query heads, K key/value heads, h head
size, F MLP size, L layers, V vocabulary.
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
from jaxtyping import Array, Float, Int

from bridge.config import ModelConfig
from learner_jax.attention import packed_attention
from learner_jax.execution import Execution
from learner_jax.sharding import constrain

Params = Mapping[str, Any]
"""Nested dict of arrays, the tree that `bridge.weight_map` maps to Hugging Face names."""
OUTPUT_SCALE = 0.1
"""Factor on the initial scale of matrices that write to the residual stream."""


@dataclass(frozen=True)
class ParamSpec:
    """One array of the tree before it exists."""

    shape: tuple[int, ...]
    axes: tuple[str, ...]
    """Logical axis of each dimension, a key of `sharding.MESH_AXES`."""
    std: float = 0.0
    """Initial values are mean + std * normal."""
    mean: float = 0.0


def abstract_params(config: ModelConfig) -> dict[str, Any]:
    """The tree of `ParamSpec`; `head` is absent where the embedding is tied.

    Initial scales: embedding 1/sqrt(D), matrices 1/sqrt(fan-in), `o` and `down` a tenth of that.
    """
    d, f, v = config.hidden_size, config.intermediate_size, config.vocab_size
    n, h = config.num_hidden_layers, config.head_dim
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads

    def layer(axes: tuple[str, ...], *shape: int, std: float = 0.0, mean: float = 0.0) -> ParamSpec:
        return ParamSpec((n, *shape), ("layers", *axes), std, mean)

    query, key_value = ("heads", "head_dim"), ("kv_heads", "head_dim")
    tree: dict[str, Any] = {
        "embed": ParamSpec((v, d), ("vocab", "embed"), std=d**-0.5),
        "layers": {
            "attn_norm": layer(("norm",), d, mean=1.0),
            "q": layer(("embed", *query), d, heads, h, std=d**-0.5),
            "q_bias": layer(query, heads, h),
            "k": layer(("embed", *key_value), d, kv_heads, h, std=d**-0.5),
            "k_bias": layer(key_value, kv_heads, h),
            "v": layer(("embed", *key_value), d, kv_heads, h, std=d**-0.5),
            "v_bias": layer(key_value, kv_heads, h),
            "o": layer((*query, "embed"), heads, h, d, std=OUTPUT_SCALE * (heads * h) ** -0.5),
            "mlp_norm": layer(("norm",), d, mean=1.0),
            "gate": layer(("embed", "mlp"), d, f, std=d**-0.5),
            "up": layer(("embed", "mlp"), d, f, std=d**-0.5),
            "down": layer(("mlp", "embed"), f, d, std=OUTPUT_SCALE * f**-0.5),
        },
        "final_norm": ParamSpec((d,), ("norm",), mean=1.0),
    }
    if not config.tie_word_embeddings:
        tree["head"] = ParamSpec((d, v), ("embed", "vocab"), std=d**-0.5)
    return tree


@partial(jax.jit, static_argnames="config")
def init_params(config: ModelConfig, key: Array) -> dict[str, Any]:
    """Draws initial parameters, float32 (float64 under `jax_enable_x64`)."""
    specs, tree = jax.tree.flatten(abstract_params(config))
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
) -> Float[Array, "B T D"]:
    """Hidden states after the last norm, from which `head_weight` makes logits.

    Args:
        params: in any type; cast to `execution.compute_dtype` on use.
        config: the shape.
        tokens: ids in [0, V).
        segment_ids: 1, 2, ... for the samples of a row, 0 for padding.
        positions: of each token in its own sample, from 0.
        execution: kernels, types and mesh.

    Returns:
        [B, T, D] in `execution.compute_dtype`. Padding positions hold finite values that mean
        nothing.
    """
    mesh, compute_dtype = execution.mesh, execution.compute_dtype
    x = params["embed"][tokens].astype(compute_dtype)  # [B, T, D]
    x = constrain(x, mesh, "batch", "sequence", None)
    rotation = _rope_angles(positions, config)

    def body(x: Array, layer: Params) -> tuple[Array, None]:
        return _layer(x, layer, config, segment_ids, rotation, execution), None

    if execution.remat == "full":
        body = jax.checkpoint(body, prevent_cse=False)  # a scan's body is not merged with another
    layers = jax.tree.map(lambda leaf: leaf.astype(compute_dtype), params["layers"])
    x, _ = jax.lax.scan(body, x, layers)
    return _rms_norm(x, params["final_norm"].astype(compute_dtype), config.rms_norm_eps)


def _layer(
    x: Float[Array, "B T D"],
    layer: Params,
    config: ModelConfig,
    segment_ids: Int[Array, "B T"],
    rotation: tuple[Array, Array],
    execution: Execution,
) -> Float[Array, "B T D"]:
    y = _rms_norm(x, layer["attn_norm"], config.rms_norm_eps)  # [B, T, D]
    q = _dense(y, layer["q"]) + layer["q_bias"]  # [B, T, H, h]
    k = _dense(y, layer["k"]) + layer["k_bias"]  # [B, T, K, h]
    v = _dense(y, layer["v"]) + layer["v_bias"]  # [B, T, K, h]
    q, k = _rotate(q, rotation), _rotate(k, rotation)
    mixed = packed_attention(q, k, v, segment_ids, execution)
    x = x + _dense(mixed, layer["o"], contract=2)  # [B, T, D]
    x = constrain(x, execution.mesh, "batch", "sequence", None)
    y = _rms_norm(x, layer["mlp_norm"], config.rms_norm_eps)  # [B, T, D]
    gated = jax.nn.silu(_dense(y, layer["gate"])) * _dense(y, layer["up"])  # [B, T, F]
    return constrain(x + _dense(gated, layer["down"]), execution.mesh, "batch", "sequence", None)


def _dense(x: Float[Array, "B T ..."], weight: Array, contract: int = 1) -> Float[Array, "B T ..."]:
    """Contracts the last `contract` dimensions of x with the first ones of the weight.

    As a product of two matrices: the weight's gradient then sums over one dimension, which XLA
    for CPUs does without a transposed copy of x, twice as fast.
    """
    rows, inner = x.shape[:-contract], math.prod(weight.shape[:contract])
    product = x.reshape(-1, inner) @ weight.reshape(inner, -1)
    return product.reshape(*rows, *weight.shape[contract:])


def widen(x: Array) -> Array:
    """`x` in at least float32."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def _rms_norm(
    x: Float[Array, "*B D"], weight: Float[Array, " D"], eps: float
) -> Float[Array, "*B D"]:
    wide = widen(x)
    wide = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)
    # Rounded before the weight, as transformers and vLLM do.
    return weight * wide.astype(x.dtype)


def _rope_angles(
    positions: Int[Array, "B T"], config: ModelConfig
) -> tuple[Float[Array, "B T 1 h2"], Float[Array, "B T 1 h2"]]:
    """Cosine and sine of position * theta^(-2i/h), for the h/2 pairs (i, i + h/2)."""
    half = config.head_dim // 2
    wide = jnp.result_type(float)  # float32, or float64 under jax_enable_x64
    frequency = config.rope_theta ** (-jnp.arange(half, dtype=wide) / half)  # [h/2]
    angles = positions[:, :, None, None].astype(wide) * frequency  # [B, T, 1, h/2]
    return jnp.cos(angles), jnp.sin(angles)


def _rotate(x: Float[Array, "B T N h"], rotation: tuple[Array, Array]) -> Float[Array, "B T N h"]:
    cos, sin = rotation
    first, second = jnp.split(widen(x), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x.dtype)
