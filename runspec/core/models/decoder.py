"""Families qwen2, qwen3, llama and mistral: one decoder, read from their config.json."""

from __future__ import annotations

from typing import Any

from runspec.core.errors import UserError
from runspec.core.models.config import SIZES, ModelConfig, check_sizes, parse_rope, rope_fields
from runspec.core.models.family import Family, Row, layer_rows, parse_config

_QWEN = {"num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "qwen2": _QWEN,
    "qwen3": {**_QWEN, "head_dim": 128},
    "llama": {},
    "mistral": {"num_key_value_heads": 8, "sliding_window": 4096},
}
"""Defaults of transformers by family, for fields missing in config.json."""
_ARCHITECTURES = {
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
}
OUTPUT_GAIN = 0.1
"""Factor on the initial values of matrices that write to the residual stream."""
_LAYER = layer_rows(
    Row("attn_norm.weight", "input_layernorm.weight", "N", "N", mean=1.0),
    Row("attention.q.weight", "self_attn.q_proj.weight", "D H h", "(H h) D", gain=1.0),
    Row("attention.q.bias", "self_attn.q_proj.bias", "H h", "(H h)", when="qkv_bias"),
    Row("attention.q_norm.weight", "self_attn.q_norm.weight", "h", "h", mean=1.0, when="qk_norm"),
    Row("attention.k.weight", "self_attn.k_proj.weight", "D K h", "(K h) D", gain=1.0),
    Row("attention.k.bias", "self_attn.k_proj.bias", "K h", "(K h)", when="qkv_bias"),
    Row("attention.k_norm.weight", "self_attn.k_norm.weight", "h", "h", mean=1.0, when="qk_norm"),
    Row("attention.v.weight", "self_attn.v_proj.weight", "D K h", "(K h) D", gain=1.0),
    Row("attention.v.bias", "self_attn.v_proj.bias", "K h", "(K h)", when="qkv_bias"),
    Row("attention.o.weight", "self_attn.o_proj.weight", "H h D", "D (H h)", gain=OUTPUT_GAIN),
    Row("attention.o.bias", "self_attn.o_proj.bias", "N", "N", when="output_bias"),
    Row("mlp_norm.weight", "post_attention_layernorm.weight", "N", "N", mean=1.0),
    Row("mlp.gate.weight", "mlp.gate_proj.weight", "D F", "F D", gain=1.0),
    Row("mlp.up.weight", "mlp.up_proj.weight", "D F", "F D", gain=1.0),
    Row("mlp.down.weight", "mlp.down_proj.weight", "F D", "D F", gain=OUTPUT_GAIN),
)
TABLE = (
    Row("embed", "model.embed_tokens.weight", "V D", "V D", gain=1.0),
    *_LAYER,
    Row("final_norm.weight", "model.norm.weight", "N", "N", mean=1.0),
    Row("head", "lm_head.weight", "D V", "V D", gain=1.0, tied="embed"),
)
"""Parameters of all these families; `when` names the flag of those that some lack."""


def read_shape(config: dict[str, Any], place: str) -> ModelConfig:
    """Read a config.json of any transformers version from 4.40 on.

    Raises:
        UserError: transformers would compute a feature that this model lacks, or a field is missing
            or invalid.
    """
    family = config["model_type"]
    if (activation := config.get("hidden_act", "silu")) != "silu":
        raise UserError(f"hidden_act {activation!r} is not supported", place=place)
    # What transformers or vLLM compute and this model does not.
    refused = ["mlp_bias", "dual_chunk_attention_config", "quantization_config"]
    if family == "mistral":
        refused.append("attention_bias")  # transformers ignores it, vLLM does not
    if name := next((name for name in refused if config.get(name)), None):
        raise UserError(f"{name} is not supported", place=place)
    fields = {**_DEFAULTS[family], **config}
    biased = family in ("llama", "qwen3") and bool(config.get("attention_bias"))
    try:
        heads = fields["num_attention_heads"]
        theta, scaling = parse_rope(config, place=place)
        if fields.get("num_key_value_heads") is None:
            fields["num_key_value_heads"] = heads
        if fields.get("head_dim") is None:
            fields["head_dim"] = fields["hidden_size"] // heads
        parsed = ModelConfig(
            model_type=family,
            **{name: fields[name] for name in SIZES},
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
    check_sizes(parsed, place)
    return parsed


def _sliding_window(fields: dict[str, Any], family: str, place: str) -> int | None:
    """Return the sliding window, or None if every layer has full attention."""
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


FAMILY = Family(read_shape, TABLE, "learner_jax.decoder:Decoder")


def hf_config(
    config: ModelConfig, *, dtype: str, eos_token_id: int, pad_token_id: int
) -> dict[str, Any]:
    """Return the config.json of a model that a run makes.

    Args:
        config: the shape.
        dtype: type of the stored weights, `float32` or `bfloat16`.
        eos_token_id, pad_token_id: of the tokenizer.

    Raises:
        ValueError: no config.json of the family can describe the shape.
    """
    written = {
        "architectures": [_ARCHITECTURES[config.model_type]],
        "model_type": config.model_type,
        "hidden_act": "silu",
        **{name: getattr(config, name) for name in SIZES},
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
