"""Shape of a decoder, read from a Hugging Face config.json."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runspec.core.errors import UserError
from runspec.core.files import read_json
from runspec.core.models.rope_scaling import Dynamic, Scaling

CONFIG_NAME = "config.json"
MAX_BYTES = 1024 * 1024
MAX_LAYERS = 4096
SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
)
"""Fields of `ModelConfig` that are natural numbers."""


@dataclass(frozen=True)
class ModelConfig:
    """Shape of a decoder, with the names of config.json.

    `model_type` names the family for other engines; the other fields determine the computation.
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
    """Whether queries, keys and values have biases."""
    output_bias: bool = False
    """Whether attention's output has a bias."""
    qk_norm: bool = False
    """Whether RMSNorm is applied to each head of queries and keys, before RoPE."""
    rope_scaling: Scaling | None = None
    sliding_window: int | None = None
    """Most tokens that a query of some layer sees, itself included; None: all."""

    @property
    def exact_length(self) -> int | None:
        """Longest sequence for which full attention and fixed RoPE are exact; None: any."""
        dynamic = isinstance(self.rope_scaling, Dynamic)
        limits = [self.sliding_window, self.max_position_embeddings if dynamic else None]
        return min((limit for limit in limits if limit is not None), default=None)

    def check_length(self, tokens: int, *, place: str) -> None:
        """Refuse sequences for which the model would differ from transformers.

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


def check_sizes(config: ModelConfig, place: str) -> None:
    """Refuse invalid sizes, on behalf of the reader of a family.

    Raises:
        UserError: a size is not a natural number, or sizes are inconsistent.
    """
    for name in SIZES:
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


def read_config(model_dir: Path) -> dict[str, Any]:
    """Return `config.json` of a Hugging Face model directory as a dict.

    Raises:
        UserError: it is unreadable, too large or not a JSON object.
    """
    remedy = "point at a Hugging Face model directory"
    found: dict[str, Any] = read_json(
        model_dir / CONFIG_NAME, MAX_BYTES, "the model's config", remedy=remedy
    )
    return found
