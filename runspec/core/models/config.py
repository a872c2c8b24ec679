"""The shape of a decoder, read from a Hugging Face config.json."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runspec.core.errors import UserError
from runspec.core.files import read_bounded
from runspec.core.models.rope_scaling import Dynamic, Scaling, parse_rope, rope_fields

_SILENT: dict[str, dict[str, Any]] = {
    "qwen2": {"num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28},
    "qwen3": {
        "num_key_value_heads": 32,
        "head_dim": 128,
        "sliding_window": 4096,
        "max_window_layers": 28,
    },
    "llama": {},
    "mistral": {"num_key_value_heads": 8, "sliding_window": 4096},
}
"""What transformers assumes, by family, where a config.json is silent."""
_ARCHITECTURES = {
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
}
FAMILIES = tuple(_SILENT)
CONFIG_NAME = "config.json"
MAX_BYTES = 1024 * 1024
MAX_LAYERS = 4096
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
    """What the model's code and the weight map need to know; names as in config.json.

    `model_type` names the family for other engines; what is computed follows from the rest.
    """

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
    qkv_bias: bool = False
    """Biases on queries, keys and values."""
    output_bias: bool = False
    """A bias on attention's output."""
    qk_norm: bool = False
    """RMSNorm over each head of queries and keys, before RoPE."""
    rope_scaling: Scaling | None = None
    sliding_window: int | None = None
    """Tokens that a query of some layer sees, itself included."""

    @property
    def exact_length(self) -> int | None:
        """Longest sequence for which full attention and fixed RoPE are this model; None: any."""
        dynamic = isinstance(self.rope_scaling, Dynamic)
        limits = [self.sliding_window, self.max_position_embeddings if dynamic else None]
        return min((limit for limit in limits if limit is not None), default=None)

    def check_length(self, tokens: int, *, place: str) -> None:
        """Refuses sequences of which the model would be another than transformers'.

        Raises:
            UserError: `tokens` is above `exact_length`.
        """
        limit = self.exact_length
        if limit is not None and tokens > limit:
            cause = "dynamic RoPE" if limit != self.sliding_window else "sliding window"
            raise UserError(
                f"{tokens} tokens in a row, but this model's {cause} begins to tell above {limit}",
                place=place,
                remedy=f"use rows of at most {limit} tokens",
            )


def parse_config(config: dict[str, Any], *, place: str) -> ModelConfig:
    """Reads a config.json of any transformers version from 4.40 on.

    Raises:
        UserError: a family that the map does not know, something that the model does not have and
            transformers would compute, or a field that is missing or is no size.
    """
    family = config.get("model_type")
    if not isinstance(family, str) or family not in FAMILIES:
        raise UserError(
            f"model_type {family!r} is not supported",
            place=place,
            remedy=f"use a model of one of these families: {', '.join(FAMILIES)}",
        )
    _refuse_unknown(config, family, place)
    fields = {**_SILENT[family], **config}
    biased = family in ("llama", "qwen3") and bool(config.get("attention_bias"))
    try:
        heads = fields["num_attention_heads"]
        theta, scaling = parse_rope(config, place=place)
        kv_heads, head_dim = fields.get("num_key_value_heads"), fields.get("head_dim")
        parsed = ModelConfig(
            model_type=family,
            vocab_size=fields["vocab_size"],
            hidden_size=fields["hidden_size"],
            intermediate_size=fields["intermediate_size"],
            num_hidden_layers=fields["num_hidden_layers"],
            num_attention_heads=heads,
            num_key_value_heads=heads if kv_heads is None else kv_heads,
            head_dim=fields["hidden_size"] // heads if head_dim is None else head_dim,
            max_position_embeddings=fields["max_position_embeddings"],
            rope_theta=theta,
            rms_norm_eps=float(fields["rms_norm_eps"]),
            tie_word_embeddings=bool(fields.get("tie_word_embeddings", False)),
            qkv_bias=family == "qwen2" or biased,
            output_bias=biased,
            qk_norm=family == "qwen3",
            rope_scaling=scaling,
            sliding_window=_sliding_window(fields, family, place),
        )
    except KeyError as error:
        raise UserError(f"field {error} is missing", place=place) from error
    except (TypeError, ValueError, ZeroDivisionError) as error:
        raise UserError(f"a field is not a number: {error}", place=place) from error
    _check_sizes(parsed, place)
    return parsed


def _refuse_unknown(config: dict[str, Any], family: str, place: str) -> None:
    """What transformers or vLLM would compute and this model would not, in silence."""
    if (activation := config.get("hidden_act", "silu")) != "silu":
        raise UserError(f"hidden_act {activation!r} is not supported", place=place)
    refused = ["mlp_bias", "dual_chunk_attention_config", "quantization_config"]
    if family == "mistral":
        refused.append("attention_bias")  # transformers ignores it, vLLM does not
    for name in refused:
        if config.get(name):
            raise UserError(f"{name} is not supported", place=place)


def _sliding_window(fields: dict[str, Any], family: str, place: str) -> int | None:
    """The window of the layers that have one, None where every layer sees everything."""
    if family == "llama":
        return None
    window = fields["sliding_window"]
    kinds = fields.get("layer_types")
    if family != "mistral":
        none_slides = kinds is None and fields["max_window_layers"] >= fields["num_hidden_layers"]
        if none_slides or not fields.get("use_sliding_window"):
            window = None
    if kinds is not None:
        if not isinstance(kinds, list) or set(kinds) - {"full_attention", "sliding_attention"}:
            raise UserError("layer_types: only full and sliding attention are known", place=place)
        if "sliding_attention" in kinds and window is None:
            raise UserError("layer_types has sliding layers, but there is no window", place=place)
        if "sliding_attention" not in kinds and family != "mistral":
            window = None
    if window is not None and (type(window) is not int or window < 1):
        raise UserError(f"sliding_window is {window!r}, not a natural number", place=place)
    return window


def _check_sizes(config: ModelConfig, place: str) -> None:
    for name in _SIZES:
        size = getattr(config, name)
        if type(size) is not int or not 1 <= size < 2**31:
            raise UserError(f"{name} is {size!r}, not a natural number", place=place)
    if config.num_hidden_layers > MAX_LAYERS:
        raise UserError(f"num_hidden_layers is above {MAX_LAYERS}", place=place)
    if config.num_attention_heads % config.num_key_value_heads:
        raise UserError(
            f"{config.num_attention_heads} query heads do not share "
            f"{config.num_key_value_heads} key-value heads evenly",
            place=place,
        )
    if config.head_dim % 2:
        raise UserError(f"head_dim is {config.head_dim}: RoPE turns pairs", place=place)
    if not (math.isfinite(config.rms_norm_eps) and config.rms_norm_eps >= 0):
        raise UserError(f"rms_norm_eps is {config.rms_norm_eps}", place=place)


def load_config(model_dir: Path) -> ModelConfig:
    """Reads `config.json` of a Hugging Face model directory."""
    return parse_config(read_config(model_dir), place=str(model_dir / CONFIG_NAME))


def read_config(model_dir: Path) -> dict[str, Any]:
    """`config.json` of a Hugging Face model directory as it is.

    Raises:
        UserError: unreadable, too large or no JSON object.
    """
    path = model_dir / CONFIG_NAME
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
    return config


def hf_config(
    config: ModelConfig, *, dtype: str, eos_token_id: int, pad_token_id: int
) -> dict[str, Any]:
    """The config.json of a model that we made ourselves.

    Args:
        config: the shape.
        dtype: `float32` or `bfloat16`, the type its weights are stored in.
        eos_token_id, pad_token_id: of its tokenizer.

    Raises:
        ValueError: a combination that no config.json of its family can say.
    """
    written = {
        "architectures": [_ARCHITECTURES[config.model_type]],
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
        **rope_fields(config.rope_theta, config.rope_scaling),
        "rms_norm_eps": config.rms_norm_eps,
        "tie_word_embeddings": config.tie_word_embeddings,
        "attention_dropout": 0.0,
        "dtype": dtype,
        "eos_token_id": eos_token_id,
        "pad_token_id": pad_token_id,
        "bos_token_id": None,
    }
    if config.model_type != "llama":
        written["sliding_window"] = config.sliding_window
    if config.model_type in ("qwen2", "qwen3"):
        written["use_sliding_window"] = config.sliding_window is not None
        written["max_window_layers"] = 0
    if config.model_type in ("llama", "qwen3"):
        written["attention_bias"] = config.output_bias
    if parse_config(written, place="hf_config") != config:
        raise ValueError(f"no {config.model_type} config.json says {config}")
    return written
