"""Prompts: the chat template where there is one, files that cannot be read, where answers begin."""

from __future__ import annotations

import json
import shutil
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from runspec.core.errors import UserError
from runspec.core.spec.schema import Reward
from sampler.tasks.grading.answers import Answer
from sampler.tasks.grading.command import answer_of
from sampler.tasks.grading.graders import Graders
from sampler.tasks.interfaces import Score
from sampler.tasks.prompts import PromptCodec, PromptForm, answer_in
from sampler.tasks.task_set import RunTask
from verify.plugins import Problem

LENGTH_PROMPT = "Think for {target} tokens."


def read(directory: Path, **form: Any) -> PromptCodec:
    return PromptCodec.read(directory, PromptForm(LENGTH_PROMPT, **form))


@pytest.fixture
def directory(tokenizer_dir: Path, tmp_path: Path) -> Path:
    shutil.copytree(tokenizer_dir, tmp_path / "model")
    return tmp_path / "model"


def configure(directory: Path, **changes: object) -> None:
    path = directory / "tokenizer_config.json"
    config = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))


def test_a_template_file_goes_before_the_configuration(directory: Path) -> None:
    (directory / "chat_template.jinja").write_text("file: {{ messages[0].content }}")
    codec = read(directory)
    assert codec.decode(codec.prompt_tokens("abc", None)) == "file: abc"


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('no') }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}{{ cycler.__init__.__globals__.os.getcwd() }}",
        "{{ 1 / 0 }}",
    ],
)
def test_a_template_is_sandboxed_and_its_failure_is_named(directory: Path, template: str) -> None:
    configure(directory, chat_template=template)
    with pytest.raises(UserError, match="the chat template fails"):
        read(directory).prompt_tokens("abc", None)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("tokenizer.json", None, "cannot read the tokenizer"),
        ("tokenizer.json", "{}", "not a tokenizer"),
        ("tokenizer_config.json", None, "cannot read the tokenizer's configuration"),
        ("tokenizer_config.json", "[1]", "not a JSON object"),
        ("tokenizer_config.json", "{", "cannot read the tokenizer's configuration"),
        ("tokenizer_config.json", "{}", "eos_token None is not in the vocabulary"),
        ("tokenizer_config.json", '{"eos_token": "<end>"}', "'<end>' is not in the vocabulary"),
        ("tokenizer_config.json", '{"chat_template": "{% if"}', "broken chat template"),
        ("tokenizer_config.json", '{"chat_template": 3}', "broken chat template"),
    ],
)
def test_files_that_make_no_tokenizer_are_named(
    directory: Path, file: str, content: str | None, message: str
) -> None:
    if content is None:
        (directory / file).unlink()
    else:
        (directory / file).write_text(content)
    with pytest.raises(UserError, match=message):
        read(directory)


TEMPLATE = "{%- for m in messages %}[{{ m.role }}]{{ m.content }}{{ eos_token }}{% endfor %}"


@pytest.mark.parametrize(
    ("form", "rendered"),
    [
        ({}, "[user]abc\nThink for 8 tokens.<eos>"),
        ({"length_role": "system"}, "[system]Think for 8 tokens.<eos>[user]abc<eos>"),
        ({"system_prompt": "Be good."}, "[system]Be good.<eos>[user]abc\nThink for 8 tokens.<eos>"),
        (
            {"system_prompt": "Be good.", "length_role": "system"},
            "[system]Be good.\nThink for 8 tokens.<eos>[user]abc<eos>",
        ),
        ({"think_prefill": True}, "[user]abc\nThink for 8 tokens.<eos><think>\n"),
    ],
)
def test_the_length_stands_in_the_message_that_the_spec_says(
    directory: Path, form: dict[str, Any], rendered: str
) -> None:
    configure(directory, chat_template=TEMPLATE)
    assert read(directory, **form).prompt_text("abc", 8) == rendered


def test_without_a_length_there_is_no_message_for_it(directory: Path) -> None:
    configure(directory, chat_template=TEMPLATE)
    assert read(directory, length_role="system").prompt_text("abc", None) == "[user]abc<eos>"


@pytest.mark.parametrize("opening", ["<think>", "<think>\n", "<think>\n\n"])
def test_thinking_that_the_template_opens_is_not_opened_twice(
    directory: Path, opening: str
) -> None:
    configure(directory, chat_template=TEMPLATE + opening.replace("\n", "{{ '\\n' }}"))
    text = read(directory, think_prefill=True).prompt_text("abc", None)
    assert text == f"[user]abc<eos>{opening}"


def test_without_a_template_messages_and_thinking_stand_below_each_other(directory: Path) -> None:
    configure(directory, chat_template=None)
    codec = read(directory, system_prompt="Be good.", length_role="system", think_prefill=True)
    assert codec.prompt_text("abc", 8) == "Be good.\nThink for 8 tokens.\nabc\n<think>\n"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (
            "{% if messages[0].role == 'system' %}{{ raise_exception('No system role') }}"
            "{% endif %}",
            "refuses a system message: No system role",
        ),
        (
            "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}",
            "leaves the system message out",
        ),
    ],
)
@pytest.mark.parametrize("form", [{"system_prompt": "Be good."}, {"length_role": "system"}])
def test_a_template_without_room_for_a_system_message_is_refused(
    directory: Path, template: str, message: str, form: dict[str, Any]
) -> None:
    configure(directory, chat_template=template)
    with pytest.raises(UserError, match=message) as caught:
        read(directory, **form)
    assert "data.length_prompt_role: user" in caught.value.remedy
    read(directory)


def test_of_several_templates_the_default_is_taken(directory: Path) -> None:
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    configure(directory, chat_template=named)
    assert read(directory).prompt_text("abc", None) == "d"
    configure(directory, chat_template=named[:1])
    with pytest.raises(UserError, match="none of the chat templates tool_use is called default"):
        read(directory)


def test_a_template_cannot_ask_what_day_it_is(directory: Path) -> None:
    dated = "{% if strftime_now is defined %}{{ strftime_now('%d') }}{% else %}fixed{% endif %}"
    configure(directory, chat_template=dated)
    assert read(directory).prompt_text("abc", None) == "fixed"


def test_a_tokenizer_that_would_cut_or_pad_does_neither(directory: Path) -> None:
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
def test_training_and_the_command_grade_the_same_text(
    tokenizer_dir: Path, output: str, answer: str
) -> None:
    codec = PromptCodec.read(tokenizer_dir, PromptForm("{target}"))
    assert codec.answer([*codec.encode(output), codec.eos_token_id]) == answer
    assert answer_of(output) == answer


def test_without_the_end_of_thinking_training_has_no_answer_and_the_command_takes_all() -> None:
    assert answer_in("<think>7") is None
    assert answer_of("<think>7") == "<think>7"
    assert answer_of(" 7 ") == "7"


@pytest.mark.slow
def test_a_model_gains_nothing_by_ending_its_thinking_twice(task: RunTask) -> None:
    # Given a word to spell, a sum and a program, each answered wrongly and then rightly, or the
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
        Answer(problem, answer_of(f"thinking</think>{first}</think>{then}"))
        for problem, good, bad in pairs
        for first, then in ((bad, good), (good, bad))
    ]
    kinds = ("reasoning_gym", "math", "code")
    rewards = [Reward.model_validate({"name": kind, "kind": kind}) for kind in kinds]
    # When they are graded
    with closing(Graders(rewards, processes=1)) as graders:
        results = graders.score(twice)
    # Then it is as if both had been written in one answer: a box counts where it is the last
    values = [result.value for result in results if isinstance(result, Score)]
    assert values == [0.0, 0.0, 1.0, 0.0, 0.0, 0.0]
