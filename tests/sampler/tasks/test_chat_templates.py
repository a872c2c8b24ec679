"""Prompts are those of `transformers`: the same ids for templates of the features in use.

The templates are minimal ones with the features of the families that they are named after.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers, processors
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from transformers import AutoTokenizer

from sampler.tasks.prompts import PromptCodec, PromptForm

QWEN = """\
{%- if tools %}{{- '<|im_start|>system\\n# Tools\\n' }}
{%- elif messages[0]['role'] == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}
{%- else %}
    {{- '<|im_start|>system\\nYou are helpful.<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
REASONING = """\
{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}
{%- set ns = namespace(system='') %}
{%- for message in messages %}{%- if message['role'] == 'system' %}
{%- set ns.system = message['content'] %}{%- endif %}{%- endfor %}
{{- bos_token }}{{ ns.system }}
{%- for message in messages %}
{%- if message['role'] == 'user' %}{{ '<|User|>' + message['content'] }}{%- endif %}
{%- endfor -%}
{% if add_generation_prompt %}{{ '<|Assistant|><think>\\n' }}{% endif %}
"""
LLAMA = """\
{{- bos_token }}
{%- if custom_tools is defined %}{%- set tools = custom_tools %}{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{%- if tools is not none %}{{- "Environment: ipython\\n" }}{%- endif %}
{{- "Today Date: 26 Jul 2024\\n\\n" }}
{{- system_message }}
{{- "<|eot_id|>" }}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- elif message.role == 'ipython' %}
        {{- raise_exception("no tools here") }}{%- continue %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
MASKED = """\
{%- for message in messages %}
{%- if message.role == 'assistant' %}{% generation %}{{ message.content }}{% endgeneration %}
{%- else %}{{ message | tojson }}{{ '\\n' }}{%- endif %}
{%- endfor %}{% if add_generation_prompt %}{{ 'A: ' }}{% endif %}
"""
TEMPLATES = {"qwen": QWEN, "reasoning": REASONING, "llama": LLAMA, "masked": MASKED}
SPECIAL = (
    *("<bos>", "<eos>", "<pad>", "<|im_start|>", "<|im_end|>", "<|User|>", "<|Assistant|>"),
    *("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<think>", "</think>"),
)
PROBLEM = "Find x where 3x + 4 = 10.\n\n  Naïve “quotes”, <b>tags</b> & 数学 <|im_end|> "


@pytest.fixture(scope="module", params=TEMPLATES)
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level BPE whose own post-processor adds a start token, as Llama's does."""
    folder = tmp_path_factory.mktemp(request.param)
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([QWEN, LLAMA, PROBLEM] * 3, trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    bos = tokenizer.token_to_id("<bos>")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", bos)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<bos>",
        "eos_token": {"__type": "AddedToken", "content": "<eos>", "special": True},
        "pad_token": "<pad>",
        "clean_up_tokenization_spaces": False,
        "chat_template": TEMPLATES[request.param],
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("target", [None, 2000])
@pytest.mark.parametrize(
    "form",
    [
        {},
        {"length_role": "system"},
        {"system_prompt": "Reason step by step."},
        {"system_prompt": "Reason step by step.", "length_role": "system"},
    ],
    ids=str,
)
def test_prompt_ids_are_those_of_transformers(
    directory: Path, form: dict[str, Any], target: int | None
) -> None:
    asked = PromptForm("Think for {target} tokens before giving a response.", **form)
    theirs = AutoTokenizer.from_pretrained(str(directory))
    expected = theirs.apply_chat_template(
        asked.messages(PROBLEM, target),
        tokenize=True,
        add_generation_prompt=True,
        return_dict=False,
    )
    assert len(expected) > 20
    assert PromptCodec.read(directory, asked).prompt_tokens(PROBLEM, target) == expected


def test_an_opened_thinking_is_encoded_as_part_of_the_text(directory: Path) -> None:
    theirs = AutoTokenizer.from_pretrained(str(directory))
    asked = PromptForm("", think_prefill=True)
    text = theirs.apply_chat_template(
        asked.messages(PROBLEM, None), tokenize=False, add_generation_prompt=True
    )
    opened = text if text.endswith("<think>\n") else f"{text}<think>\n"
    expected = theirs(opened, add_special_tokens=False)["input_ids"]
    codec = PromptCodec.read(directory, asked)
    assert codec.prompt_tokens(PROBLEM, None) == expected
    assert codec.prompt_text(PROBLEM, None).count("<think>") == 1
