"""What both sides compute: a model's shape, one optimizer batch, and the settings of the update."""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

LLAMA_8B = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rope_theta": 5e5,
    "rms_norm_eps": 1e-5,
}
QWEN_7B = {
    "model_type": "qwen2",
    "vocab_size": 152064,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "rope_theta": 1e6,
    "rms_norm_eps": 1e-6,
}
SMALL = {
    "model_type": "qwen2",
    "vocab_size": 4096,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "rope_theta": 1e6,
    "rms_norm_eps": 1e-6,
}
TINY = {
    "model_type": "qwen2",
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "rope_theta": 1e4,
    "rms_norm_eps": 1e-6,
}
SHAPES: dict[str, dict[str, Any]] = {
    "llama-8b": LLAMA_8B,
    "qwen-7b": QWEN_7B,
    "small": SMALL,
    "tiny": TINY,
}
LAYERS = {"llama-8b": 32, "qwen-7b": 28, "small": 4, "tiny": 2}
SAMPLES = 4
PROMPT = 8
"""A prompt is one eighth of its sample."""
SETTINGS = {"lr": 1e-5, "clip_norm": 0.5, "betas": (0.9, 0.95), "eps": 1e-8}
EPS_LOW, EPS_HIGH, DELTA, ENTROPY = 0.2, 0.2, 4.0, 1e-4


@dataclass(frozen=True)
class Case:
    shape: str
    layers: int
    tokens: int
    """Tokens of the batch: four samples of a quarter each, packed into one row."""
    dtype: str = "bfloat16"
    """Type of products and activations; masters, moments and gradients are float32."""
    repeats: int = 5
    remat: str = "attention"
    attention: str = "auto"

    @property
    def lengths(self) -> list[int]:
        return [self.tokens // SAMPLES] * SAMPLES

    def config(self) -> dict[str, Any]:
        """config.json of the model."""
        return SHAPES[self.shape] | {
            "num_hidden_layers": self.layers,
            "max_position_embeddings": self.tokens,
            "tie_word_embeddings": False,
        }

    def batch(self) -> tuple[list[np.ndarray], np.ndarray]:
        """(token ids of each sample, an advantage each)."""
        rng = np.random.default_rng(0)
        vocab = SHAPES[self.shape]["vocab_size"]
        ids = [rng.integers(0, vocab, length, dtype=np.int32) for length in self.lengths]
        return ids, rng.normal(size=SAMPLES)

    def arguments(self) -> list[str]:
        """Arguments of a side's command line."""
        return [f"--{name}={value}" for name, value in asdict(self).items()]


def side_arguments() -> tuple[Case, Path | None]:
    """The case and the folder of weights that a side's command line names."""
    parser = argparse.ArgumentParser()
    for name, kind in (("shape", str), ("layers", int), ("tokens", int), ("dtype", str)):
        parser.add_argument(f"--{name}", type=kind, required=True)
    parser.add_argument("--repeats", type=int, required=True)
    for name in ("remat", "attention"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--weights", type=Path)
    options = vars(parser.parse_args())
    weights = options.pop("weights")
    return Case(**options), weights
