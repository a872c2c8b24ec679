"""Prompts: ids as transformers has them, files that cannot be read, where an answer begins."""

from __future__ import annotations

import json
import shutil
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, processors
from transformers import AutoTokenizer

from runspec.core.errors import UserError
from runspec.core.schema import Data, Reward
from sampler.tasks.graders import Graders
from sampler.tasks.interfaces import Answer, Score
from sampler.tasks.prompts import PromptCodec, answer_in
from verify.plugins import Problem

DIALOGUE = """\
{{- bos_token }}
{%- if custom_tools is defined %}{%- set tools = custom_tools %}{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "You are helpful." %}
{%- endif %}
{{- '<|im_start|>system\\n' + system_message + '<|im_end|>\\n' }}
{%- if tools is not none %}{{- "Environment: ipython\\n" }}{%- endif %}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or 'tool_calls' in message) %}
        {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] | trim + '<|im_end|>' }}
    {%- elif message.role == 'ipython' %}
        {{- raise_exception("no tools here") }}{%- continue %}
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
{%- if message.role == 'assistant' %}{% generation %}{{ message.content }}{% endgeneration %}
{%- elif message.role == 'user' and loop.last %}{{ message | tojson }}{{ '\\n' }}{%- endif %}
{%- endfor -%}
{% if add_generation_prompt %}{{ '<think>\\n' }}{% endif %}
"""
PROBLEM = "Find x where 3x + 4 = 10.\n\n  Naïve “quotes”, <b>tags</b> & 数学 <|im_end|> "
BOTH = {"system_prompt": "Reason step by step.", "length_prompt_role": "system"}


@pytest.mark.parametrize("template", [DIALOGUE, REASONING], ids=["dialogue", "reasoning"])
@pytest.mark.parametrize("form", [{}, *({key: BOTH[key]} for key in BOTH), BOTH], ids=str)
@pytest.mark.parametrize("target", [None, 2000])
def test_prompts_are_those_of_transformers(directory, template, form, target):
    """For templates with the features of today's families, of a tokenizer whose own post-processor
    adds a start token, as Llama's does. An opened thinking is encoded as part of the text."""
    configure(directory, chat_template=template, bos_token="<pad>")
    path = str(directory / "tokenizer.json")
    tokenizer = Tokenizer.from_file(path)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<pad> $A", special_tokens=[("<pad>", tokenizer.token_to_id("<pad>"))]
    )
    tokenizer.save(path)
    theirs = AutoTokenizer.from_pretrained(str(directory))
    asked = asking("Think for {target} tokens.", **form)
    messages = asked.prompt_messages(PROBLEM, target)
    text = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    for think_prefill in (False, True):
        opened = f"{text}<think>\n" if think_prefill and template is DIALOGUE else text
        codec = PromptCodec.read(
            directory, asked.model_copy(update={"think_prefill": think_prefill})
        )
        assert codec.prompt_text(PROBLEM, target) == opened
        ids = theirs(opened, add_special_tokens=False)["input_ids"]
        assert codec.prompt_tokens(PROBLEM, target) == ids


def asking(length_prompt: str, **form: Any) -> Data:
    return Data.model_construct(length_prompt=length_prompt, **form)


def read(directory: Path, **form: Any) -> PromptCodec:
    return PromptCodec.read(directory, asking("Think for {target} tokens.", **form))


@pytest.fixture
def directory(tokenizer_dir, tmp_path):
    shutil.copytree(tokenizer_dir, tmp_path / "model")
    return tmp_path / "model"


def configure(directory: Path, **changes: object) -> None:
    path = directory / "tokenizer_config.json"
    config = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))


TEMPLATE = "{%- for m in messages %}[{{ m.role }}]{{ m.content }}{{ eos_token }}{% endfor %}"
DATED = "{% if strftime_now is defined %}{{ strftime_now('%d %b %Y') }}{% endif %}"
TODAY = "{%- set today = strftime_now('%Y-%m-%d') %}{{ today }}" + TEMPLATE
GOOD = {"system_prompt": "Be good."}
SYSTEM = {"length_prompt_role": "system"}


@pytest.mark.parametrize(
    ("template", "form", "target", "rendered"),
    [
        (TEMPLATE, {}, 8, "[user]abc\nThink for 8 tokens.<eos>"),
        (
            TEMPLATE,
            {"length_prompt_role": "system"},
            8,
            "[system]Think for 8 tokens.<eos>[user]abc<eos>",
        ),
        (TEMPLATE, SYSTEM, None, "[user]abc<eos>"),
        (TEMPLATE, GOOD, 8, "[system]Be good.<eos>[user]abc\nThink for 8 tokens.<eos>"),
        (
            TEMPLATE,
            {**GOOD, "length_prompt_role": "system"},
            8,
            "[system]Be good.\nThink for 8 tokens.<eos>[user]abc<eos>",
        ),
        (TEMPLATE, {"think_prefill": True}, None, "[user]abc<eos><think>\n"),
        # thinking that the template opens is not opened twice
        (f"{TEMPLATE}<think>", {"think_prefill": True}, None, "[user]abc<eos><think>"),
        (
            f"{TEMPLATE}<think>{{{{ '\\n\\n' }}}}",
            {"think_prefill": True},
            None,
            "[user]abc<eos><think>\n\n",
        ),
        # without a template messages and thinking stand below each other
        (
            None,
            {**GOOD, "length_prompt_role": "system", "think_prefill": True},
            8,
            "Be good.\nThink for 8 tokens.\nabc\n<think>\n",
        ),
        # a template that asks what day it is gets the same day always
        (DATED, {}, None, "26 Jul 2024"),
        (TODAY, {}, None, "2024-07-26[user]abc<eos>"),
        (TODAY, GOOD, None, "2024-07-26[system]Be good.<eos>[user]abc<eos>"),
        (
            [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}],
            {},
            None,
            "d",
        ),
    ],
)
def test_messages_are_rendered_as_asked(directory, template, form, target, rendered):
    configure(directory, chat_template=template)
    assert read(directory, **form).prompt_text("abc", target) == rendered
    # and a template file goes before the configuration
    (directory / "chat_template.jinja").write_text("file: {{ messages[-1].content[:3] }}")
    assert read(directory).prompt_text("abc", None) == "file: abc"


CONFIG, FAILS = "tokenizer_config.json", "the chat template fails"
REFUSING = "{% if messages[0].role == 'system' %}{{ raise_exception('No system role') }}{% endif %}"
USERS_ALONE = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
ESCAPE = "{{ ''.__class__.__mro__ }}{{ cycler.__init__.__globals__.os.getcwd() }}"


@pytest.mark.parametrize(
    ("file", "content", "form", "message"),
    [
        ("tokenizer.json", None, {}, "cannot read the tokenizer"),
        ("tokenizer.json", "{}", {}, "not a tokenizer"),
        (CONFIG, None, {}, "cannot read the tokenizer's configuration"),
        (CONFIG, "[1]", {}, "not a JSON object"),
        (CONFIG, "{", {}, "cannot read the tokenizer's configuration"),
        (CONFIG, "{}", {}, "eos_token None is not in the vocabulary"),
        (CONFIG, '{"eos_token": "<end>"}', {}, "'<end>' is not in the vocabulary"),
        ("template", "{% if", {}, "broken chat template"),
        ("template", 3, {}, "broken chat template"),
        ("template", [{"name": "tool", "template": "t"}], {}, "templates tool is called default"),
        # a template is sandboxed, and its failure is named
        *[("template", text, {}, FAILS) for text in ("{{ raise_exception('no') }}", ESCAPE)],
        *[("template", text, {}, FAILS) for text in ("{{ messages.append(1) }}", "{{ 1 / 0 }}")],
        # and one that fails without a system message too does not refuse it
        ("template", "{{ nothing() }}", GOOD, f"{FAILS}: 'nothing' is undefined\n.*remedy: put a"),
        # one without room for a system message is refused where there is one
        *[
            ("template", template, form, message)
            for form in (GOOD, {"length_prompt_role": "system"})
            for template, message in (
                (
                    REFUSING,
                    "refuses a system message: No (.|\n)*data.length_prompt_role: user",
                ),
                (USERS_ALONE, "leaves the system message out(.|\n)*data.length_prompt_role: user"),
            )
        ],
    ],
)
def test_what_makes_no_prompt_is_named(directory, file, content, form, message):
    if file == "template":
        configure(directory, chat_template=content)
    elif content is None:
        (directory / file).unlink()
    else:
        (directory / file).write_text(content)
    with pytest.raises(UserError, match=message):
        read(directory, **form).prompt_tokens("abc", None)
    if form:
        read(directory)


def test_a_tokenizer_that_would_cut_or_pad_does_neither(directory):
    path = directory / "tokenizer.json"
    before = read(directory).prompt_tokens("a" * 50, None)
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.enable_truncation(10)
    tokenizer.enable_padding(length=200)
    path.write_text(tokenizer.to_str())
    assert read(directory).prompt_tokens("a" * 50, None) == before


@pytest.mark.parametrize(
    ("output", "answer"),
    [
        ("</think>x", "x"),
        ("<think>a</think> x ", "x"),
        ("a</think>x</think>y", "x</think>y"),
        ("a</think></think>y", "</think>y"),
        ("a</think>x<think>b</think>y</think>", "x<think>b</think>y</think>"),
        ("a</think>", ""),
    ],
)
def test_the_answer_follows_the_first_end_of_the_thinking(tokenizer_dir, output, answer):
    for thinking in ("required", "optional"):
        codec = PromptCodec.read(tokenizer_dir, asking("{target}", thinking=thinking))
        assert codec.answer([*codec.encode(output), codec.eos_token_id]) == answer


@pytest.mark.parametrize(
    ("thinking", "whole", "cut"),
    [("required", None, "7"), ("optional", "<think>7", "7"), ("none", "<think>7", "a</think>7")],
)
def test_an_output_that_does_not_end_its_thinking_is_graded_as_the_spec_says(
    tokenizer_dir, thinking, whole, cut
):
    assert answer_in(" <think>7 ", thinking) == whole
    assert answer_in("a</think>7", thinking) == cut
    codec = PromptCodec.read(tokenizer_dir, asking("{target}", thinking=thinking))
    assert codec.answer(codec.encode("a</think>7")) is None  # it was cut off


@pytest.mark.slow
def test_a_model_gains_nothing_by_ending_its_thinking_twice(task):
    # given a word to spell, a sum and a program, each answered wrongly and then rightly, or the
    # other way round, with an end of thinking between the two
    word = task.problem(0)
    right = str(word.verification["answer"])
    total = Problem("sum", "math", "", {"ground_truth": "18"})
    program = Problem("program", "code", "", {"inputs": [""], "outputs": ["18"]})
    pairs = [
        (word, right, right[::-1] + "x"),
        (total, r"\boxed{18}", r"\boxed{17}"),
        (program, "print(18)", "print(17)"),
    ]
    twice = [
        Answer(problem, answer_in(f"thinking</think>{first}</think>{then}", "optional"))
        for problem, good, bad in pairs
        for first, then in ((bad, good), (good, bad))
    ]
    kinds = ("reasoning_gym", "math", "code")
    rewards = [Reward.model_validate({"name": k, "kind": k, "timeout": "10m"}) for k in kinds]
    # when they are graded
    with closing(Graders(rewards, processes=1)) as graders:
        results = graders.score(twice)
    # then it is as if both had been written in one answer: a box counts where it is the last
    values = [result.value for result in results if isinstance(result, Score)]
    assert values == [0.0, 0.0, 1.0, 0.0, 0.0, 0.0]
