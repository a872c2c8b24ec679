"""Small models made by transformers, of sizes that divide nothing evenly."""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from bridge.conversion import LeafReader
from bridge.weight_map import Path as LeafPath
from runspec.core.models import ModelConfig

MakeModel = Callable[..., Path]
LINEAR = {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0}
FAMILIES = {
    "qwen2": {},
    "qwen3": {"head_dim": 6, "attention_bias": True},
    "llama": {"rope_parameters": LINEAR},
    "mistral": {"head_dim": 6, "sliding_window": 16},
}


@pytest.fixture
def make_model(tmp_path: Path) -> MakeModel:
    """Writes a random model with transformers and returns its directory."""

    def make(
        *,
        tied: bool = False,
        dtype: str = "float32",
        max_shard_size: str = "5GB",
        name: str = "hf",
        family: str = "qwen2",
    ) -> Path:
        torch.manual_seed(0)
        config = CONFIG_MAPPING[family](
            vocab_size=37,
            hidden_size=20,
            intermediate_size=29,
            num_hidden_layers=3,
            num_attention_heads=5,
            num_key_value_heads=1,
            max_position_embeddings=64,
            tie_word_embeddings=tied,
            **FAMILIES[family],
        )
        model = AutoModelForCausalLM.from_config(config)
        for parameter in model.parameters():  # biases and norms start constant: make them tell
            torch.nn.init.normal_(parameter, std=0.3)
        directory = tmp_path / name
        model.to(getattr(torch, dtype)).save_pretrained(directory, max_shard_size=max_shard_size)
        (directory / "tokenizer.json").write_text('{"model": {}}')
        return directory

    return make


def iter_leaves(hf_dir: Path, config: ModelConfig) -> Iterator[tuple[LeafPath, np.ndarray]]:
    """A model's leaves, one after the other."""
    reader = LeafReader(hf_dir, config)
    for path in reader.entries:
        yield path, reader.read(path)
