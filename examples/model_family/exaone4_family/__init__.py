"""EXAONE 4.0 (arXiv 2507.11407) for runspec: its config.json and its table of parameters.

Norms stand after attention and MLP, none before. Imports no JAX: the module is named, and only the
learner imports it.
"""

from __future__ import annotations

from typing import Any

from runspec.core.errors import UserError
from runspec.core.models import ModelConfig, check_sizes, parse_rope
from runspec.core.models.family import Family, Row, layer_rows

OUTPUT_GAIN = 0.1
TABLE = (
    Row("embed", "model.embed_tokens.weight", "V D", "V D", gain=1.0),
    *layer_rows(
        Row("attention.q.weight", "self_attn.q_proj.weight", "D H h", "(H h) D", gain=1.0),
        Row("attention.q_norm.weight", "self_attn.q_norm.weight", "h", "h", mean=1.0),
        Row("attention.k.weight", "self_attn.k_proj.weight", "D K h", "(K h) D", gain=1.0),
        Row("attention.k_norm.weight", "self_attn.k_norm.weight", "h", "h", mean=1.0),
        Row("attention.v.weight", "self_attn.v_proj.weight", "D K h", "(K h) D", gain=1.0),
        Row("attention.o.weight", "self_attn.o_proj.weight", "H h D", "D (H h)", gain=OUTPUT_GAIN),
        Row("after_attention.weight", "post_attention_layernorm.weight", "N", "N", mean=1.0),
        Row("mlp.gate.weight", "mlp.gate_proj.weight", "D F", "F D", gain=1.0),
        Row("mlp.up.weight", "mlp.up_proj.weight", "D F", "F D", gain=1.0),
        Row("mlp.down.weight", "mlp.down_proj.weight", "F D", "D F", gain=OUTPUT_GAIN),
        Row("after_mlp.weight", "post_feedforward_layernorm.weight", "N", "N", mean=1.0),
    ),
    Row("final_norm.weight", "model.norm.weight", "N", "N", mean=1.0),
    Row("head", "lm_head.weight", "D V", "V D", gain=1.0, tied="embed"),
)


def read_shape(config: dict[str, Any], place: str) -> ModelConfig:
    """Reads the config.json of a model with full attention in every layer.

    Raises:
        UserError: layers with a window, which leave RoPE out elsewhere, or a field that is missing.
    """
    if config.get("sliding_window") or "sliding_attention" in config.get("layer_types", ()):
        raise UserError("layers with a sliding window are not supported", place=place)
    theta, scaling = parse_rope(config, place=place)
    try:
        heads = config["num_attention_heads"]
        parsed = ModelConfig(
            model_type=config["model_type"],
            vocab_size=config["vocab_size"],
            hidden_size=config["hidden_size"],
            intermediate_size=config["intermediate_size"],
            num_hidden_layers=config["num_hidden_layers"],
            num_attention_heads=heads,
            num_key_value_heads=config["num_key_value_heads"],
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            max_position_embeddings=config["max_position_embeddings"],
            rope_theta=theta,
            rms_norm_eps=config["rms_norm_eps"],
            tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
            qk_norm=True,
            rope_scaling=scaling,
        )
    except KeyError as error:
        raise UserError(f"field {error} is missing", place=place) from error
    check_sizes(parsed, place)
    return parsed


FAMILY = Family(read_shape, TABLE, "exaone4_family.policy:Exaone4")
