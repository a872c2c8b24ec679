"""The shape of a decoder, read from a Hugging Face config.json."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runspec.common.errors import UserError
from runspec.common.files import read_bounded

FAMILIES = ("qwen2",)
MAX_BYTES = 1024 * 1024
_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
)


@dataclass(frozen=True)
class ModelConfig:
    """What the model's code and the weight map need to know; names as in config.json."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rope_theta: float
    rms_norm_eps: float
    tie_word_embeddings: bool


def parse_config(config: dict[str, Any], *, place: str) -> ModelConfig:
    """Reads a config.json of any transformers version from 4.40 on.

    Raises:
        UserError: a family that the map does not know, attention or an activation that the model
            does not have, or a field that is missing or is no size.
    """
    family = config.get("model_type")
    if family not in FAMILIES:
        raise UserError(
            f"model_type {family!r} is not supported",
            place=place,
            remedy=f"use a model of one of these families: {', '.join(FAMILIES)}",
        )
    rope = config.get("rope_parameters") or {}
    kind = rope.get("rope_type", "default")
    if kind != "default" or config.get("rope_scaling"):
        raise UserError(f"RoPE scaling {kind!r} is not supported", place=place)
    # vLLM and transformers would compute another model than ours, in silence.
    if config.get("use_sliding_window"):
        raise UserError("sliding-window attention is not supported", place=place)
    if (activation := config.get("hidden_act", "silu")) != "silu":
        raise UserError(f"hidden_act {activation!r} is not supported", place=place)
    try:
        heads = config["num_attention_heads"]
        parsed = ModelConfig(
            model_type=family,
            vocab_size=config["vocab_size"],
            hidden_size=config["hidden_size"],
            intermediate_size=config["intermediate_size"],
            num_hidden_layers=config["num_hidden_layers"],
            num_attention_heads=heads,
            num_key_value_heads=config.get("num_key_value_heads", heads),
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            max_position_embeddings=config["max_position_embeddings"],
            rope_theta=float(rope.get("rope_theta", config.get("rope_theta", 10000.0))),
            rms_norm_eps=float(config["rms_norm_eps"]),
            tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
        )
    except KeyError as error:
        raise UserError(f"field {error} is missing", place=place) from error
    except (TypeError, ValueError, ZeroDivisionError) as error:
        raise UserError(f"a field is not a number: {error}", place=place) from error
    for name in _SIZES:
        size = getattr(parsed, name)
        if type(size) is not int or size < 1:
            raise UserError(f"{name} is {size!r}, not a natural number", place=place)
    return parsed


def load_config(model_dir: Path) -> ModelConfig:
    """Reads `config.json` of a Hugging Face model directory."""
    path = model_dir / "config.json"
    try:
        config = json.loads(read_bounded(path, MAX_BYTES))
        if not isinstance(config, dict):
            raise ValueError("not a JSON object")
    except (OSError, ValueError) as error:
        raise UserError(
            f"cannot read the model's config: {error}",
            place=str(path),
            remedy="point at a Hugging Face model directory",
        ) from error
    return parse_config(config, place=str(path))


def hf_config(
    config: ModelConfig, *, dtype: str, eos_token_id: int, pad_token_id: int
) -> dict[str, Any]:
    """The config.json of a model that we made ourselves.

    Args:
        config: the shape.
        dtype: `float32` or `bfloat16`, the type its weights are stored in.
        eos_token_id, pad_token_id: of its tokenizer.
    """
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": config.model_type,
        "hidden_act": "silu",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_position_embeddings,
        "rope_theta": config.rope_theta,
        "rms_norm_eps": config.rms_norm_eps,
        "tie_word_embeddings": config.tie_word_embeddings,
        "use_sliding_window": False,
        "attention_dropout": 0.0,
        "dtype": dtype,
        "eos_token_id": eos_token_id,
        "pad_token_id": pad_token_id,
        "bos_token_id": None,
    }
