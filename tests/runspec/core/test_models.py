"""A config.json as transformers reads it, or an error that says what we would compute otherwise;
what the assistant says, by a model's chat template; devices by kind."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from bridge.weight_map import hf_shapes
from runspec.core.errors import UserError
from runspec.core.models import (
    DEVICES,
    Dynamic,
    Linear,
    Llama3,
    ModelConfig,
    Yarn,
    device_count,
    jax_device,
)
from runspec.core.models.family import hf_config, model_names, named_model, parse_config
from runspec.core.models.parameters import parameter_count
from runspec.core.schema import Hardware
from runspec.core.tokenizer_files import ChatTemplate

PUBLISHED_PARAMETERS = {
    "Qwen/Qwen2.5-32B": 32_763_876_352,
    "Qwen/QwQ-32B": 32_763_876_352,
    "Qwen/Qwen3-4B": 4_022_468_096,
    "meta-llama/Llama-3.1-8B": 8_030_261_248,
    "metagene-ai/METAGENE-1": 6_484_660_224,
}
FAMILIES = ("qwen2", "qwen3", "llama", "mistral")
BASE = {
    "vocab_size": 37,
    "hidden_size": 24,
    "intermediate_size": 29,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
}
WINDOW = {"sliding_window": 8, "use_sliding_window": True}
DYNAMIC = {"rope_scaling": {"type": "dynamic", "factor": 2.0}}
FULL, SLIDING = ["full_attention"], ["sliding_attention"]


def parse(family: str, **fields: Any) -> ModelConfig:
    fields = {"model_type": family, **BASE, "num_key_value_heads": 2, **fields}
    return parse_config(fields, place="config.json")


def in_transformers(fields: dict[str, Any]) -> tuple[str, dict[str, tuple[int, ...]]]:
    """Class and shapes of the model, made on the meta device: shapes without memory."""
    fields = dict(fields)
    with torch.device("meta"):
        config = CONFIG_MAPPING[fields.pop("model_type")](**fields)
        model = AutoModelForCausalLM.from_config(config)
    return type(model).__name__, {k: tuple(v.shape) for k, v in model.named_parameters()}


@pytest.mark.parametrize("name", PUBLISHED_PARAMETERS)
def test_a_named_model_has_its_published_parameters(name):
    # given the config that ships
    fields = named_model(name)
    assert fields is not None and set(model_names()) == PUBLISHED_PARAMETERS.keys()
    # when its tensors are listed
    config = parse_config(fields, place=name)
    shapes = dict(hf_shapes(config))
    # then they are those of transformers, and as many numbers as were published
    assert shapes == in_transformers(fields)[1]
    assert sum(torch.Size(shape).numel() for shape in shapes.values()) == PUBLISHED_PARAMETERS[name]
    assert parameter_count(config) == PUBLISHED_PARAMETERS[name]
    # and a name is no path
    assert named_model(f"../models/{name.replace('/', '--')}") is None


@pytest.mark.parametrize(
    ("family", "said"),
    [
        *((family, {}) for family in FAMILIES),
        *((family, {"num_key_value_heads": None}) for family in ("qwen2", "qwen3", "llama")),
        ("mistral", {"num_key_value_heads": 2}),
    ],
)
def test_what_a_config_leaves_out_is_what_transformers_assumes(family, said):
    # given a config with little in it; of Qwen's, 32 key-value heads are assumed
    many = family in ("qwen2", "qwen3") and not said
    heads = {"num_attention_heads": 64 if many else 24, "hidden_size": 128 if many else 48}
    fields = {"model_type": family, **BASE, **heads, **said}
    # when both read it, then the tensors are the same
    config = parse_config(fields, place="config.json")
    assert dict(hf_shapes(config)) == in_transformers(fields)[1]


@pytest.mark.parametrize(
    ("family", "fields", "longest", "message"),
    [
        ("llama", {"sliding_window": 8}, None, ""),
        ("mistral", {"sliding_window": None}, None, ""),
        ("mistral", {}, 4096, "sliding window begins to tell above 4096"),
        ("qwen2", {"sliding_window": 8}, None, ""),
        ("qwen2", WINDOW, None, ""),  # 28 layers before it
        ("qwen2", {**WINDOW, "max_window_layers": 3}, 8, "window begins to tell above 8"),
        ("qwen3", {**WINDOW, "layer_types": FULL * 3 + SLIDING}, 8, "begins to tell above 8"),
        ("qwen3", {**WINDOW, "max_window_layers": 1, "layer_types": FULL * 4}, None, ""),
        ("llama", DYNAMIC, 64, "65 tokens in a row, but this model's dynamic RoPE"),
    ],
)
def test_a_window_and_dynamic_rope_limit_the_rows(family, fields, longest, message):
    config = parse(family, **fields)
    assert config.exact_length == longest
    config.check_length(longest or 10**6, place="rows")
    if longest is not None:
        with pytest.raises(UserError, match=f"rows: .*{message}"):
            config.check_length(longest + 1, place="rows")


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
        ("llama", {"rope_parameters": {"full_attention": {}}}, "differs between layers"),
        ("llama", {"rope_scaling": {"type": "linear", "factor": True}}, "factor is True"),
        ("llama", {"rope_scaling": {"type": "yarn", "factor": float("nan")}}, "factor is nan"),
        ("llama", {"rope_scaling": {"type": "yarn", "factor": 2, "truncate": 1}}, "truncate is 1"),
        ("llama", {"rope_scaling": "yarn"}, "differs between layers"),
        ("llama", {"rope_theta": 1}, "not above 1"),
        ("llama", {"num_key_value_heads": 4}, "6 query heads do not share 4"),
        ("llama", {"head_dim": 5}, "head_dim is 5: RoPE turns pairs"),
        ("llama", {"num_hidden_layers": 10**6}, "num_hidden_layers is above"),
        ("llama", {"vocab_size": 2**31}, "vocab_size is 2147483648"),
        ("llama", {"rms_norm_eps": float("inf")}, "rms_norm_eps is inf"),
        ("qwen3", {"layer_types": ["chunked_attention"]}, "only full and sliding attention"),
        ("qwen3", {"layer_types": SLIDING}, "there is no window"),
        ("mistral", {"sliding_window": -1}, "sliding_window is -1"),
    ],
)
def test_what_would_be_another_model_is_refused(family, fields, message):
    with pytest.raises(UserError, match=message):
        parse(family, **fields)


@pytest.mark.parametrize(
    "scaling",
    [
        None,
        Linear(2.0),
        Dynamic(3.0),
        Yarn(4.0, 16, 1.25, 30.0, 2.0, False),
        Llama3(8.0, 1.0, 4.0, 16),
    ],
    ids=str,
)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_config_of_our_own_is_read_back_and_known_to_transformers(family, scaling):
    # given a shape of our own
    config = parse(family, head_dim=6, rope_theta=700.0, sliding_window=None)
    config = replace(config, rope_scaling=scaling)
    # when its config.json is written
    written = hf_config(config, dtype="float32", eos_token_id=1, pad_token_id=0)
    # then it is read back, and transformers makes the same tensors of it
    assert parse_config(written, place="config.json") == config
    assert in_transformers(written) == (written["architectures"][0], dict(hf_shapes(config)))


def test_a_shape_that_no_config_can_say_is_not_written():
    config = replace(parse("qwen2"), qkv_bias=False)
    with pytest.raises(ValueError, match=r"no qwen2 config\.json says"):
        hf_config(config, dtype="float32", eos_token_id=1, pad_token_id=0)


@pytest.mark.parametrize(
    ("fields", "slices", "count"),
    [
        ({"topology": "4x4"}, 2, 32),
        ({"topology": "2x2", "count": 5}, 1, 4),
        ({}, 1, None),
        ({"topology": "4x"}, 1, None),
    ],
)
def test_devices_are_counted_over_topology_and_slices(fields, slices, count):
    hardware = Hardware.model_validate({"kind": "tpu-v5e", **fields})
    assert device_count(hardware, slices) == count


def test_a_device_is_found_by_the_name_that_jax_gives_it():
    """Others: `test_peaks_of_devices_as_they_call_themselves` of the learner."""
    assert jax_device("NVIDIA A100-SXM4-40GB") == DEVICES["a100-40g"]


PLAIN = """\
{%- for m in messages %}{{ '<' + m.role + '>' + m.content + '</s>\\n' }}{% endfor %}
{%- if add_generation_prompt %}<assistant>{% endif %}
"""
MARKED = """\
{%- for m in messages %}
{{- '<' + m.role + '>' }}
{%- if m.role == 'assistant' %}{% generation %}{{ m.content + '</s>' }}{% endgeneration %}
{%- else %}{{ m.content + '</s>' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<assistant>{% endif %}
"""
THOUGHTS = "(m.content if loop.last or m.role != 'assistant' else '') +"
"""Of earlier turns they are left out, as reasoning models have it."""
FORGETS = PLAIN.replace("m.content +", THOUGHTS)
ASKS_OTHERWISE = PLAIN.replace("%}<assistant>{", "%}<assistant><think>{")
NESTED = "{% generation %}{% generation %}a{% endgeneration %}{% endgeneration %}"
LEFT = "{% for m in messages %}{% generation %}a{% break %}{% endgeneration %}{% endfor %}"
CHANGED = "{% set x %} {% generation %} a {% endgeneration %}{% endset %}{{ x | length }}{{ x }}"
TALK = [
    {"role": "system", "content": "Add."},
    {"role": "user", "content": "1 + 2?"},
    {"role": "assistant", "content": "add(1, 2)"},
    {"role": "tool", "content": "3"},
    {"role": "assistant", "content": "3 \u00e9t\u00e9"},
    {"role": "user", "content": "3 \u00e9t\u00e9"},
]


def said(template: str, talk: list[dict[str, Any]] = TALK) -> list[str]:
    text, spans = ChatTemplate(template, {}, "model").spans(talk)
    return [text[begin:stop] for begin, stop in spans]


def test_the_assistants_turns_are_found_with_and_without_a_mark():
    # given turns of all roles, the last two with the same words; only the assistant's are found
    assert said(MARKED) == ["add(1, 2)</s>", "3 \u00e9t\u00e9</s>"]
    # without a mark a turn reaches up to the next
    assert said(PLAIN) == ["add(1, 2)</s>\n", "3 \u00e9t\u00e9</s>\n"]
    assert said(MARKED, TALK[:2]) == said(PLAIN, TALK[:2]) == []
    # and marks do not change the text
    template = ChatTemplate(MARKED, {}, "model")
    text, _ = template.spans(TALK)
    assert template.render(TALK) == f"{text}<assistant>"
    assert text.startswith("<system>Add.</s><user>1 + 2?</s><assistant>add(1, 2)</s><tool>3</s>")


@pytest.mark.parametrize(
    ("role", "content"),
    [("user", "\ue0f0"), ("assistant", "a\ue0f1b"), ("assistant", "\ue0f1\ue0f0")],
)
def test_a_message_cannot_hold_the_mark(role, content):
    talk = [*TALK, {"role": role, "content": content}]
    with pytest.raises(UserError, match=f"U\\+{ord(content.strip('ab')[0]):04X}, which is res"):
        said(MARKED, talk)
    # a template that has no mark takes any character
    assert len(said(PLAIN, talk)) == 2 + (role == "assistant")


@pytest.mark.parametrize(
    ("template", "message"),
    [
        # turns that cannot be told
        (FORGETS, "the chat template renders message 3 .* more follows"),
        (ASKS_OTHERWISE, "the chat template renders message 3 .* than it asks for it"),
        # marks that are nested, left, or enclose what is changed later
        *((template, "within itself") for template in (NESTED, LEFT, CHANGED)),
        # failures of the template's own
        ("{{ raise_exception('no tools') }}", "chat template"),
        ("{% generation %}{{ 1 / 0 }}", "chat template"),
    ],
)
def test_a_template_that_does_not_tell_the_turns_is_refused(template, message):
    with pytest.raises(UserError, match=message) as error:
        said(template)
    assert error.value.place == "model"
    if message != "chat template":
        assert "{% generation %}" in f"{error.value.thing} {error.value.remedy}"
        assert error.value.remedy


def test_a_template_must_have_the_assistants_message():
    for template in (PLAIN, MARKED):
        ChatTemplate(template, {}, "model").require_assistant_message()
    roles = "{% for m in messages %}{{ m.role }}{% endfor %}"
    for template in (roles, MARKED.replace("{{ m.content + '</s>' }}{% end", "{% end")):
        with pytest.raises(UserError, match="leaves out or does not mark") as error:
            ChatTemplate(template, {}, "model").require_assistant_message()
        assert (error.value.place, bool(error.value.remedy)) == ("model", True)
