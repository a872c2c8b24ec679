"""A config.json as transformers reads it, or an error that says what we would compute otherwise."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from bridge.weight_map import hf_shapes
from runspec.core.errors import UserError
from runspec.core.models.config import ModelConfig
from runspec.core.models.decoder import hf_config
from runspec.core.models.family import parse_config
from runspec.core.models.parameters import parameter_count
from runspec.core.models.rope_scaling import Dynamic, Linear, Llama3, Scaling, Yarn
from runspec.core.models.spec_model import model_names, named_model

PUBLISHED_PARAMETERS = {
    "Qwen/Qwen2.5-32B": 32_763_876_352,
    "Qwen/QwQ-32B": 32_763_876_352,
    "Qwen/Qwen3-4B": 4_022_468_096,
    "meta-llama/Llama-3.1-8B": 8_030_261_248,
    "metagene-ai/METAGENE-1": 6_484_660_224,
}
BASE = {
    "vocab_size": 37,
    "hidden_size": 24,
    "intermediate_size": 29,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
}


def parse(family: str, **fields: Any) -> ModelConfig:
    return parse_config({"model_type": family, **BASE, **fields}, place="config.json")


def in_transformers(fields: dict[str, Any]) -> Any:
    """The model on the meta device: shapes without memory."""
    fields = dict(fields)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(CONFIG_MAPPING[fields.pop("model_type")](**fields))


@pytest.mark.parametrize("name", PUBLISHED_PARAMETERS)
def test_a_named_model_has_its_published_parameters(name: str) -> None:
    # given the config that ships
    fields = named_model(name)
    assert fields is not None and set(model_names()) == PUBLISHED_PARAMETERS.keys()
    # when its tensors are listed
    config = parse_config(fields, place=name)
    shapes = dict(hf_shapes(config))
    # then they are those of transformers, and as many numbers as were published
    theirs = {key: tuple(value.shape) for key, value in in_transformers(fields).named_parameters()}
    assert shapes == theirs
    assert sum(torch.Size(shape).numel() for shape in shapes.values()) == PUBLISHED_PARAMETERS[name]
    assert parameter_count(config) == PUBLISHED_PARAMETERS[name]


def test_a_name_is_no_path() -> None:
    for name in ("Qwen/None", "../models/Qwen--QwQ-32B", "Qwen--QwQ-32B", ""):
        assert named_model(name) is None, name


@pytest.mark.parametrize(
    ("family", "said"),
    [
        *((family, {}) for family in ("qwen2", "qwen3", "llama", "mistral")),
        *((family, {"num_key_value_heads": None}) for family in ("qwen2", "qwen3", "llama")),
        ("mistral", {"num_key_value_heads": 2}),
    ],
)
def test_what_a_config_leaves_out_is_what_transformers_assumes(
    family: str, said: dict[str, Any]
) -> None:
    # given a config with little in it
    fields = {"model_type": family, **BASE, "num_attention_heads": 24, "hidden_size": 48, **said}
    if family in ("qwen2", "qwen3") and not said:
        fields["num_attention_heads"] = 64  # 32 key-value heads are assumed
        fields["hidden_size"] = 128
    # when both read it, then the tensors are the same
    theirs = in_transformers(fields).named_parameters()
    config = parse_config(fields, place="config.json")
    assert dict(hf_shapes(config)) == {key: tuple(value.shape) for key, value in theirs}


@pytest.mark.parametrize(
    ("family", "fields", "window"),
    [
        ("llama", {"sliding_window": 8}, None),
        ("mistral", {"sliding_window": None}, None),
        ("mistral", {"sliding_window": 8}, 8),
        ("mistral", {"num_key_value_heads": 2}, 4096),
        ("qwen2", {"sliding_window": 8}, None),
        ("qwen2", {"sliding_window": 8, "use_sliding_window": True}, None),  # 28 layers before it
        ("qwen2", {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 3}, 8),
        (
            "qwen3",
            {
                "sliding_window": 8,
                "use_sliding_window": True,
                "layer_types": ["full_attention"] * 3 + ["sliding_attention"],
            },
            8,
        ),
        (
            "qwen3",
            {
                "sliding_window": 8,
                "use_sliding_window": True,
                "max_window_layers": 1,
                "layer_types": ["full_attention"] * 4,
            },
            None,
        ),
    ],
)
def test_a_window_is_a_limit_on_the_rows(
    family: str, fields: dict[str, Any], window: int | None
) -> None:
    config = parse(family, **{"num_key_value_heads": 2, **fields})
    assert config.exact_length == window
    if window is None:
        config.check_length(10**6, place="learner.packing.tokens")
    else:
        config.check_length(window, place="learner.packing.tokens")
        with pytest.raises(UserError, match=rf"sliding window begins to tell above {window}"):
            config.check_length(window + 1, place="learner.packing.tokens")


def test_dynamic_rope_is_exact_up_to_the_models_length() -> None:
    config = parse("llama", rope_scaling={"type": "dynamic", "factor": 2.0})
    config.check_length(64, place="rows")
    with pytest.raises(UserError, match="rows: 65 tokens in a row, but this model's dynamic RoPE"):
        config.check_length(65, place="rows")


@pytest.mark.parametrize(
    ("family", "fields", "message"),
    [
        ("gpt2", {}, "model_type 'gpt2' is not supported"),
        ("llama", {"mlp_bias": True}, "mlp_bias is not supported"),
        ("mistral", {"attention_bias": True}, "attention_bias is not supported"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ("llama", {"quantization_config": {"bits": 4}}, "quantization_config is not supported"),
        ("qwen2", {"dual_chunk_attention_config": {"a": 1}}, "dual_chunk_attention_config"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor is not supported"),
        ("llama", {"rope_scaling": {"type": "longrope"}}, "RoPE scaling 'longrope'"),
        ("llama", {"rope_parameters": {"rope_type": "proportional"}}, "RoPE scaling 'proport"),
        ("llama", {"rope_parameters": {"full_attention": {}}}, "differs between layers"),
        ("llama", {"rope_scaling": {"type": "linear"}}, "factor is None, not a positive"),
        ("llama", {"rope_scaling": {"type": "linear", "factor": True}}, "factor is True"),
        ("llama", {"rope_scaling": {"type": "yarn", "factor": float("nan")}}, "factor is nan"),
        ("llama", {"rope_scaling": {"type": "yarn", "factor": 2, "truncate": 1}}, "truncate is 1"),
        ("llama", {"rope_scaling": "yarn"}, "differs between layers"),
        ("llama", {"rope_theta": 0}, "rope_theta is 0"),
        ("llama", {"rope_theta": 1}, "not above 1"),
        ("llama", {"num_key_value_heads": 4}, "6 query heads do not share 4"),
        ("llama", {"head_dim": 5}, "head_dim is 5: RoPE turns pairs"),
        ("llama", {"num_hidden_layers": 10**6}, "num_hidden_layers is above"),
        ("llama", {"vocab_size": 2**31}, "vocab_size is 2147483648"),
        ("llama", {"rms_norm_eps": float("inf")}, "rms_norm_eps is inf"),
        ("qwen3", {"layer_types": ["chunked_attention"]}, "only full and sliding attention"),
        ("qwen3", {"layer_types": ["sliding_attention"]}, "there is no window"),
        ("mistral", {"sliding_window": -1}, "sliding_window is -1"),
    ],
)
def test_what_would_be_another_model_is_refused(
    family: str, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        parse(family, **{"num_key_value_heads": 2, **fields})


@pytest.mark.parametrize(
    "scaling",
    [
        None,
        Linear(2.0),
        Dynamic(3.0),
        Yarn(4.0, 16, 1.25, 30.0, 2.0, False),
        Llama3(8.0, 1.0, 4.0, 16),
    ],
)
@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama", "mistral"])
def test_a_config_of_our_own_is_read_back_and_known_to_transformers(
    family: str, scaling: Scaling | None
) -> None:
    # given a shape of our own
    said = {"num_key_value_heads": 2, "head_dim": 6, "rope_theta": 700.0, "sliding_window": None}
    config = replace(parse(family, **said), rope_scaling=scaling)
    # when its config.json is written
    written = hf_config(config, dtype="float32", eos_token_id=1, pad_token_id=0)
    # then it is read back, and transformers makes the same tensors of it
    assert parse_config(written, place="config.json") == config
    model = in_transformers(written)
    assert dict(hf_shapes(config)) == {k: tuple(v.shape) for k, v in model.named_parameters()}
    assert type(model).__name__ == written["architectures"][0]


def test_a_shape_that_no_config_can_say_is_not_written() -> None:
    config = replace(parse("qwen2", num_key_value_heads=2), qkv_bias=False)
    with pytest.raises(ValueError, match=r"no qwen2 config\.json says"):
        hf_config(config, dtype="float32", eos_token_id=1, pad_token_id=0)
