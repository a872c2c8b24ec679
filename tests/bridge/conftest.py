"""Small models made by transformers, of sizes that divide nothing evenly."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from tests.learner_jax.conftest import Run, tiny_spec

MakeModel = Callable[..., Path]
FAMILIES = {
    "qwen2": {"model_type": "qwen2"},
    "qwen3": {"model_type": "qwen3", "head_dim": 6, "attention_bias": True},
    "llama": {
        "model_type": "llama",
        "rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0},
    },
    "mistral": {"model_type": "mistral", "head_dim": 6, "sliding_window": 16},
}


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """A run directory in which a learner would have written versions."""
    return Run(tmp_path / "run", tiny_spec())


@pytest.fixture
def make_model(tmp_path: Path) -> MakeModel:
    """Writes a random model with transformers and returns its directory."""

    def make(
        *,
        tied: bool,
        dtype: str,
        max_shard_size: str = "5GB",
        name: str = "hf",
        family: str = "qwen2",
    ) -> Path:
        torch.manual_seed(0)
        fields = dict(FAMILIES[family])
        config = CONFIG_MAPPING[fields.pop("model_type")](
            vocab_size=37,
            hidden_size=20,
            intermediate_size=29,
            num_hidden_layers=3,
            num_attention_heads=5,
            num_key_value_heads=1,
            max_position_embeddings=64,
            tie_word_embeddings=tied,
            **fields,
        )
        model = AutoModelForCausalLM.from_config(config)
        for parameter in model.parameters():  # biases and norms start constant: make them tell
            torch.nn.init.normal_(parameter, std=0.3)
        directory = tmp_path / name
        model.to(getattr(torch, dtype)).save_pretrained(directory, max_shard_size=max_shard_size)
        (directory / "tokenizer.json").write_text('{"model": {}}')
        return directory

    return make
