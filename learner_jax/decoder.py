"""The decoder of Qwen2, Qwen3, Llama and Mistral, with its embedding and rotary positions.

Rotary positions are those of arXiv 2104.09864, with the scaling that a model's config names.

Letters: B rows, T positions, D hidden size, H query heads, K key/value heads, h head size, F MLP
size, V vocabulary.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import nn
from jaxtyping import Array, Float, Int

from learner_jax.attention import attend_shared, from_zigzag, packed_attention, to_zigzag
from learner_jax.model import Linear, RMSNorm, param, scan_layers, stacked
from learner_jax.packing import Rows, Spans
from learner_jax.sharding import Execution, constrain, wide_dtype, widen
from runspec.core.models import Linear as LinearScaling
from runspec.core.models import Llama3, ModelConfig, Yarn
from runspec.core.models.family import OUTPUT_GAIN, normal

Rotation = tuple[Array, Array]
"""Cosine and sine, [B, T, 1, h/2] each, at least float32."""


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def embed(
    table: Float[Array, "V D"], tokens: Int[Array, "B T"], execution: Execution
) -> Float[Array, "B T D"]:
    """`table[tokens]` in `execution.compute_dtype`; the gradient is summed in at least float32.

    The table is gathered over fsdp first, as a layer's weights are before their products: looked up
    in a table that is cut along D, the activations of all rows would be exchanged instead.
    """
    whole = table.astype(execution.compute_dtype)
    return constrain(whole, execution.mesh, "vocab", None)[tokens]


def _embed_forward(
    table: Array, tokens: Array, execution: Execution
) -> tuple[Array, tuple[Array, Array]]:
    return embed(table, tokens, execution), (table, tokens)


def _embed_backward(
    execution: Execution, residuals: tuple[Array, Array], dx: Array
) -> tuple[Array, None]:
    # A token comes often, and a sum of many terms in bfloat16 would lose most of them.
    (table, tokens), mesh = residuals, execution.mesh
    wide = wide_dtype(table.dtype)
    zeros = constrain(jnp.zeros_like(table, wide), mesh, "vocab", None)
    summed = zeros.at[tokens].add(dx.astype(wide))
    return constrain(summed, mesh, "vocab", "embed").astype(table.dtype), None


embed.defvjp(_embed_forward, _embed_backward)


def frequencies(config: ModelConfig) -> Float[np.ndarray, " h2"]:
    """Angle per position of each of the h/2 pairs of dimensions (i, i + h/2), float64.

    Plain RoPE: theta^(-2i/h). The variants are those of transformers' `modeling_rope_utils`;
    `dynamic` is plain up to the length that `ModelConfig.exact_length` allows.
    """
    half = config.head_dim // 2
    plain = config.rope_theta ** (-np.arange(half, dtype=np.float64) / half)
    match config.rope_scaling:
        case LinearScaling(factor):
            return plain / factor
        case Yarn() as yarn:
            kept = 1.0 - _yarn_ramp(yarn, config)
            return plain / yarn.factor * (1.0 - kept) + plain * kept
        case Llama3() as llama:
            # Turns within the original length: many are kept, few divided, between them a ramp.
            turns = llama.original_max_position_embeddings * plain / (2 * math.pi)
            low, high = llama.low_freq_factor, llama.high_freq_factor
            kept = np.clip((turns - low) / (high - low), 0.0, 1.0)
            return plain / llama.factor * (1.0 - kept) + plain * kept
    return plain


def _yarn_ramp(yarn: Yarn, config: ModelConfig) -> Float[np.ndarray, " h2"]:
    """0 for the pairs that are kept, 1 for those that are divided."""
    size, length = config.head_dim, yarn.original_max_position_embeddings

    def dimension(turns: float) -> float:
        """Where a pair turns that often within the original length."""
        return size * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(config.rope_theta))

    low, high = dimension(yarn.beta_fast), dimension(yarn.beta_slow)
    if yarn.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    if low == high:
        high += 0.001
    return np.clip((np.arange(size // 2) - low) / (high - low), 0.0, 1.0)


def rotation(positions: Int[Array, "B T"], config: ModelConfig) -> Rotation:
    """Cosine and sine of position * frequency, times YaRN's attention factor."""
    wide = jnp.result_type(float)  # float32, or float64 under jax_enable_x64
    frequency = jnp.asarray(frequencies(config), wide)
    angles = positions[:, :, None, None].astype(wide) * frequency  # [B, T, 1, h/2]
    scaling = config.rope_scaling
    amplitude = scaling.attention_factor if isinstance(scaling, Yarn) else 1.0
    return jnp.cos(angles) * amplitude, jnp.sin(angles) * amplitude


def rotate(x: Float[Array, "B T N h"], turn: Rotation) -> Float[Array, "B T N h"]:
    """Turns each pair (x_i, x_(i + h/2)) of every head; computed in at least float32."""
    cos, sin = turn
    first, second = jnp.split(widen(x), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x.dtype)


class Attention(nnx.Module):
    """Causal attention of grouped heads inside the segments of packed rows."""

    def __init__(self, config: ModelConfig) -> None:
        width, eps, h = {"embed": config.hidden_size}, config.rms_norm_eps, config.head_dim
        heads = {"heads": config.num_attention_heads, "head_dim": h}
        kv_heads = {"kv_heads": config.num_key_value_heads, "head_dim": h}
        self.q = Linear(width, heads, bias=config.qkv_bias)
        self.k = Linear(width, kv_heads, bias=config.qkv_bias)
        self.v = Linear(width, kv_heads, bias=config.qkv_bias)
        self.o = Linear(heads, width, bias=config.output_bias, gain=OUTPUT_GAIN)
        self.q_norm = RMSNorm({"head_dim": h}, eps) if config.qk_norm else None
        self.k_norm = RMSNorm({"head_dim": h}, eps) if config.qk_norm else None

    def __call__(
        self,
        x: Float[Array, "B T D"],
        segment_ids: Int[Array, "B T"],
        turn: Rotation,
        execution: Execution,
        shared: Rows | Spans | None,
    ) -> Float[Array, "B T D"]:
        mesh = execution.mesh
        q, k = self.q(x, mesh), self.k(x, mesh)  # [B, T, H, h], [B, T, K, h]
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = rotate(q, turn), rotate(k, turn), self.v(x, mesh)
        if shared is None:
            mixed = packed_attention(q, k, v, segment_ids, execution)
        else:
            mixed = attend_shared(q, k, v, shared, execution)
        return self.o(mixed, mesh)


class Mlp(nnx.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, config: ModelConfig) -> None:
        width, inner = {"embed": config.hidden_size}, {"mlp": config.intermediate_size}
        self.gate = Linear(width, inner)
        self.up = Linear(width, inner)
        self.down = Linear(inner, width, gain=OUTPUT_GAIN)

    def __call__(self, x: Float[Array, "B T D"], execution: Execution) -> Float[Array, "B T D"]:
        mesh = execution.mesh
        gated = nn.silu(self.gate(x, mesh)) * self.up(x, mesh)  # [B, T, F]
        return self.down(gated, mesh)


class DecoderLayer(nnx.Module):
    """Attention and MLP, each after a norm and added to the residual stream."""

    def __init__(self, config: ModelConfig) -> None:
        width, eps = {"norm": config.hidden_size}, config.rms_norm_eps
        self.attn_norm = RMSNorm(width, eps)
        self.attention = Attention(config)
        self.mlp_norm = RMSNorm(width, eps)
        self.mlp = Mlp(config)

    def __call__(
        self,
        x: Float[Array, "B T D"],
        segment_ids: Int[Array, "B T"],
        turn: Rotation,
        execution: Execution,
        shared: Rows | Spans | None,
    ) -> Float[Array, "B T D"]:
        mesh = execution.mesh
        x = x + self.attention(self.attn_norm(x), segment_ids, turn, execution, shared)
        x = constrain(x, mesh, "batch", "sequence", None)
        x = x + self.mlp(self.mlp_norm(x), execution)
        return constrain(x, mesh, "batch", "sequence", None)


class Decoder(nnx.Module):
    """Embedding, layers and last norm; the output head, tied or of its own."""

    layer: type[Any] = DecoderLayer
    """The class of its layers, of config: another family may have another."""

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        width, vocabulary = config.hidden_size, config.vocab_size
        self.embed = param(normal(width), {"vocab": vocabulary, "embed": width})
        self.layers = stacked(self.layer(config), config.num_hidden_layers)
        self.final_norm = RMSNorm({"norm": width}, config.rms_norm_eps)
        tied = config.tie_word_embeddings
        self.head = None if tied else param(normal(width), {"embed": width, "vocab": vocabulary})

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        segment_ids: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        execution: Execution,
        shared: Rows | Spans | None = None,
    ) -> Float[Array, "B T D"]:
        """See `model.Policy`."""
        mesh = execution.mesh
        # Under context parallelism the columns are in another order in here, and nowhere else.
        tokens, segment_ids, positions = (
            to_zigzag(x, mesh) for x in (tokens, segment_ids, positions)
        )
        x = embed(self.embed[...], tokens, execution)  # [B, T, D]
        x = constrain(x, mesh, "batch", "sequence", None)
        turn = rotation(positions, self.config)
        x = scan_layers(
            self.layers,
            lambda layer, x: layer(x, segment_ids, turn, execution, shared),
            x,
            execution,
        )
        return from_zigzag(self.final_norm(x), mesh)

    def head_weight(self) -> Float[Array, "D V"]:
        """See `model.Policy`."""
        return self.embed[...].T if self.head is None else self.head[...]
