"""Rotary positions (arXiv 2104.09864), with the scaling that a model's config names."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from learner_jax.execution import widen
from runspec.core.models.config import ModelConfig
from runspec.core.models.rope_scaling import Linear, Llama3, Yarn

Rotation = tuple[Array, Array]
"""Cosine and sine, [B, T, 1, h/2] each, at least float32."""


def frequencies(config: ModelConfig) -> Float[np.ndarray, " h2"]:
    """Angle per position of each of the h/2 pairs of dimensions (i, i + h/2), float64.

    Plain RoPE: theta^(-2i/h). The variants are those of transformers' `modeling_rope_utils`;
    `dynamic` is plain up to the length that `ModelConfig.exact_length` allows.
    """
    half = config.head_dim // 2
    plain = config.rope_theta ** (-np.arange(half, dtype=np.float64) / half)
    match config.rope_scaling:
        case Linear(factor):
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
