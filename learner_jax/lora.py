"""Low-rank adapters (LoRA, arXiv 2106.09685): a second, small tree beside frozen weights.

A matrix W of a layer, seen as [in, out], becomes W + (alpha / rank) A B with A [in, rank] and
B [rank, out], of which A and B are trained. B starts at zero, so a run starts at its base model.
The tree is {"layers": {"q_a": [L, D, r], "q_b": [L, r, H, h], ...}}: stacked like the base, the
matrices' own dimensions kept, so that adapters are cut over the mesh as their matrices are.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from learner_jax.execution import widen
from learner_jax.model import Params, ParamSpec, draw
from runspec.core.models.config import ModelConfig
from runspec.core.models.flops import matrix_shapes
from runspec.core.models.parameters import Parameter, lora_parameters
from runspec.core.spec import schema


def abstract_lora(config: ModelConfig, lora: schema.Lora) -> dict[str, Any]:
    """The tree of `ParamSpec` of the adapters.

    A is drawn from N(0, 1 / (3 fan-in)), the variance of PEFT's uniform draw; B is 0.
    """
    matrices = matrix_shapes(config)

    def drawn(name: str, parameter: Parameter) -> ParamSpec:
        target, _, part = name.rpartition("_")
        std = (3 * matrices[target][0]) ** -0.5 if part == "a" else 0.0
        return ParamSpec(parameter.shape, parameter.axes, std)

    layers = lora_parameters(config, lora)["layers"]
    return {"layers": {name: drawn(name, leaf) for name, leaf in layers.items()}}


def init_lora(config: ModelConfig, lora: schema.Lora, key: Array) -> dict[str, Any]:
    """Draws adapters, float32 (float64 under `jax_enable_x64`), a function of the key.

    Not the numbers that `model.init_params` draws from the same key.
    """
    return draw(abstract_lora(config, lora), jax.random.fold_in(key, 1))


def with_adapters(base: Params, lora_params: Params, lora: schema.Lora) -> dict[str, Any]:
    """Parameters for `model.final_hidden` whose layers add (alpha / rank) (x A) B.

    Differentiable in both trees; nothing of W's size is made.
    """
    scale = lora.alpha / lora.rank
    adapters = {
        name: leaf * scale if name.endswith("_b") else leaf
        for name, leaf in lora_params["layers"].items()
    }
    return {**base, "layers": {**base["layers"], **adapters}}


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
    merged = dict(base["layers"])
    for target in sorted(set(lora.targets)):  # the same program in every process
        a, b = lora_params["layers"][f"{target}_a"], lora_params["layers"][f"{target}_b"]

        def one_layer(parts: tuple[Array, Array, Array]) -> Array:
            weight, a, b = parts
            delta = jnp.tensordot(widen(a), widen(b), axes=1, precision=jax.lax.Precision.HIGHEST)
            total = widen(weight) + (lora.alpha / lora.rank) * delta
            return total.astype(dtype or total.dtype)

        merged[target] = jax.lax.map(one_layer, (merged[target], a, b))
    return {**base, "layers": merged}
