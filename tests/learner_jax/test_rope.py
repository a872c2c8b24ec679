"""RoPE scaling: what transformers turns, from either spelling of a config."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from learner_jax.decoder import rotate, rotation
from runspec.core.models.family import parse_config
from tests.learner_jax.families import LLAMA3, YARN, in_double

LENGTH = 64
POSITIONS = np.array([[0, 1, 2, 3, 15, 16, 17, 31, 62, 63]])
VARIANTS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 2.5},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "yarn": YARN,
    "yarn, its length is the model's": {"rope_type": "yarn", "factor": 3.0},
    "yarn, factor of the lengths": {**YARN, "factor": None},
    "yarn, attention factor": {**YARN, "attention_factor": 1.7},
    "yarn, ramp": {**YARN, "beta_fast": 5.0, "beta_slow": 0.5},
    "yarn, ramp between dimensions": {**YARN, "truncate": False},
    "yarn, mscale": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.3},
    "yarn, mscale alone": {**YARN, "mscale": 0.7},
    "yarn that shrinks": {**YARN, "factor": 0.5},
    "llama3": LLAMA3,
    "llama3, narrow": {**LLAMA3, "low_freq_factor": 0.7, "high_freq_factor": 1.1},
}


def config_fields(head_dim: int, rope: dict[str, Any]) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "vocab_size": 11,
        "hidden_size": 12,
        "intermediate_size": 13,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "head_dim": head_dim,
        "max_position_embeddings": LENGTH,
        "rms_norm_eps": 1e-6,
        **rope,
    }


@pytest.mark.parametrize("head_dim", [6, 20])
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_variant_turns_as_transformers_turns(variant: str, head_dim: int) -> None:
    # given the parameters of a variant, in the spelling of transformers 5 and in the older one
    parameters = VARIANTS[variant]
    older = {("type" if key == "rope_type" else key): value for key, value in parameters.items()}
    spellings = [
        {"rope_parameters": {**parameters, "rope_theta": 500.0}},
        {"rope_scaling": older, "rope_theta": 500.0},
    ]
    fields = config_fields(head_dim, spellings[0])
    # when transformers computes cosine and sine in double
    with in_double():
        module = LlamaRotaryEmbedding(LlamaConfig(**fields))
        cos, sin = module(torch.zeros(1, dtype=torch.float64), torch.tensor(POSITIONS))
    # then both spellings give the same, of which transformers keeps two copies
    for spelling in spellings:
        config = parse_config(config_fields(head_dim, spelling), place="config.json")
        with jax.enable_x64(True):
            ours = rotation(POSITIONS, config)
            for found, expected in zip(ours, (cos, sin), strict=True):
                both = np.concatenate([found, found], axis=-1)[:, :, 0]
                np.testing.assert_allclose(both, expected.numpy(), rtol=1e-12, atol=1e-12)


def test_a_rotation_keeps_what_only_distance_decides() -> None:
    # given two vectors, rotated at pairs of positions that are the same distance apart
    config = parse_config(config_fields(20, {"rope_theta": 100.0}), place="config.json")
    with jax.enable_x64(True):
        q, k = np.random.default_rng(0).normal(size=(2, 1, 1, 1, 20)).repeat(3, axis=2)
        at = rotation(np.array([[3, 11, 40]]), config), rotation(np.array([[1, 9, 38]]), config)
        # when their products are taken
        products = (rotate(q, at[0]) * rotate(k, at[1])).sum(-1)
    # then they are the same
    np.testing.assert_allclose(products, products[:, [0, 0, 0]], rtol=1e-12)
