"""Small Qwen2 models made by transformers, of sizes that divide nothing evenly."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

MakeModel = Callable[..., Path]


@pytest.fixture
def make_model(tmp_path: Path) -> MakeModel:
    """Writes a random model with transformers and returns its directory."""

    def make(*, tied: bool, dtype: str, max_shard_size: str = "5GB", name: str = "hf") -> Path:
        torch.manual_seed(0)
        config = Qwen2Config(
            vocab_size=37,
            hidden_size=20,
            intermediate_size=29,
            num_hidden_layers=3,
            num_attention_heads=5,
            num_key_value_heads=1,
            max_position_embeddings=64,
            tie_word_embeddings=tied,
        )
        model = Qwen2ForCausalLM(config)
        for parameter in model.parameters():  # biases and norms start constant: make them tell
            torch.nn.init.normal_(parameter, std=0.3)
        directory = tmp_path / name
        model.to(getattr(torch, dtype)).save_pretrained(directory, max_shard_size=max_shard_size)
        (directory / "tokenizer.json").write_text('{"model": {}}')
        return directory

    return make
