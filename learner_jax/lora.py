"""Low-rank adapters (LoRA, arXiv 2106.09685): a second, small tree beside frozen weights.

A matrix W of a layer, seen as [in, out], becomes W + (alpha / rank) A B with A [in, rank] and
B [rank, out], of which A and B are trained. B starts at zero, so a run starts at its base model.
`modules.Linear` computes it, its `Adapter` parameters are the tree: beside a weight [L, D, H, h]
stand a [L, D, r] and b [L, r, H, h], stacked and cut over the mesh as the weight is.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from learner_jax.execution import widen
from learner_jax.model import Params, draw, split
from runspec.core.models.config import ModelConfig
from runspec.core.spec import schema


def abstract_lora(config: ModelConfig, lora: schema.Lora) -> dict[str, Any]:
    """The tree of `Parameter` of the adapters."""
    return split(config, lora).adapters


def init_lora(config: ModelConfig, lora: schema.Lora, key: Array) -> dict[str, Any]:
    """Draws adapters, float32 (float64 under `jax_enable_x64`), a function of the key.

    Not the numbers that `model.init_params` draws from the same key.
    """
    return draw(abstract_lora(config, lora), jax.random.fold_in(key, 1))


def merge(
    base: Params, lora_params: Params, lora: schema.Lora, dtype: np.dtype | type | None = None
) -> dict[str, Any]:
    """The plain parameters W + (alpha / rank) A B, as every engine without adapters reads them.

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
