"""Random models of every family as transformers makes them, in sizes that divide nothing evenly.

transformers rounds norms, angles and softmax to float32 whatever a model's type; `in_double` reads
that as float64, so that a model in double is double all through.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any
from unittest import mock

import numpy as np
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

LENGTHS = (7, 10, 8, 33, 2)
VOCABULARY = 37
_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 30,
    "intermediate_size": 47,
    "num_hidden_layers": 3,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


def _heads(family: str, heads: int, kv_heads: int, size: int | None = None) -> dict[str, Any]:
    own = {} if size is None else {"head_dim": size}
    counts = {"num_attention_heads": heads, "num_key_value_heads": kv_heads}
    return {"model_type": family, **counts, **own}


FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2, tied": {
        **_heads("qwen2", 5, 1),
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_theta": 700.0, **YARN},
    },
    "qwen3, head_dim is not D / H": {
        **_heads("qwen3", 6, 2, 8),
        "tie_word_embeddings": True,
    },
    "qwen3, biases": {
        **_heads("qwen3", 3, 1, 14),
        "attention_bias": True,
    },
    "llama 3": {
        **_heads("llama", 6, 2, 8),
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_theta": 5000.0, **LLAMA3},
    },
    "llama, biases, full heads": {
        "model_type": "llama",
        "num_attention_heads": 5,
        "attention_bias": True,
        "rope_parameters": {"rope_theta": 900.0, "rope_type": "dynamic", "factor": 2.0},
    },
    "mistral": {**_heads("mistral", 6, 3, 12), "sliding_window": 33},
}


FROM_PACKAGE: dict[str, dict[str, Any]] = {
    "exaone4": {
        **_heads("exaone4", 6, 2, 8),
        "sliding_window": None,
        "layer_types": ["full_attention"] * 3,
        "rope_parameters": {"rope_theta": 3000.0, **LLAMA3},
    }
}
"""Families that a package brings (`examples/model_family`)."""


def transformers_config(name: str) -> Any:
    fields = {**_SIZES, **(FAMILIES | FROM_PACKAGE)[name]}
    return CONFIG_MAPPING[fields.pop("model_type")](**fields)


@contextmanager
def in_double(dtype: str = "float64") -> Iterator[None]:
    """Whatever asks torch for float32 gets float64; nothing changes for another `dtype`."""
    if dtype != "float64":
        yield
        return
    with (
        mock.patch.object(torch, "float32", torch.float64),
        mock.patch.object(torch, "float", torch.float64),
        mock.patch.object(torch.Tensor, "float", torch.Tensor.double),
    ):
        yield


@cache
def saved(name: str) -> Path:
    """The model's directory: random weights in which biases and norms tell, as float32."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(transformers_config(name))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    directory = Path(mkdtemp(prefix="family-"))
    model.save_pretrained(directory)
    return directory


def loaded(name: str, dtype: str) -> Any:
    return loaded_from(saved(name), dtype)


def loaded_from(directory: Path, dtype: str) -> Any:
    """transformers' own model, to be called in `in_double`."""
    stored = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    with in_double(dtype):  # RoPE's frequencies are computed here
        model = AutoModelForCausalLM.from_config(
            stored.config, dtype=getattr(torch, dtype), attn_implementation="eager"
        )
    model.load_state_dict(stored.state_dict())
    return model.eval()


@cache
def lines() -> tuple[np.ndarray, ...]:
    """Token ids of a few samples."""
    rng = np.random.default_rng(0)
    return tuple(rng.integers(0, VOCABULARY, n).astype(np.int32) for n in LENGTHS)


@cache
def token_weights() -> tuple[np.ndarray, ...]:
    """A weight for every log-prob, so that no gradient is zero by symmetry."""
    rng = np.random.default_rng(1)
    return tuple(rng.normal(size=n - 1) for n in LENGTHS)


@dataclass(frozen=True)
class Theirs:
    """What transformers says of each sample, alone."""

    logits: list[np.ndarray]
    logprobs: list[np.ndarray]
    gradients: dict[str, np.ndarray]
    """Of the weighted sum of all log-probs, by Hugging Face name."""


@cache
def theirs(name: str, dtype: str) -> Theirs:
    kind, model = getattr(torch, dtype), loaded(name, dtype)
    with in_double(dtype):
        all_logits, all_logprobs, total = [], [], torch.zeros((), dtype=kind)
        for ids, weights in zip(lines(), token_weights(), strict=True):
            tokens = torch.tensor(ids.astype(np.int64))
            logits = model(tokens[None]).logits[0]
            logprobs = logits.log_softmax(-1)[:-1].gather(1, tokens[1:, None])[:, 0]
            total = total + (logprobs * torch.tensor(weights, dtype=kind)).sum()
            all_logits.append(logits.detach().numpy())
            all_logprobs.append(logprobs.detach().numpy())
        total.backward()
    gradients = {key: value.grad.numpy() for key, value in model.named_parameters()}
    return Theirs(all_logits, all_logprobs, gradients)
