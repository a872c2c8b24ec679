"""Prompts: the chat template where there is one, and files that cannot be read."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from runspec.common.errors import UserError
from sampler.tasks.prompts import PromptCodec, PromptForm

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


def test_the_length_prompt_stands_on_its_own_line_inside_the_template(directory: Path) -> None:
    template = "{%- for m in messages %}[{{ m.role }}] {{ m.content }}{{ eos_token }}{% endfor %}"
    configure(directory, chat_template=template)
    codec = read(directory)
    assert codec.decode(codec.prompt_tokens("abc", 8)) == "[user] abc\nthink for 8 tokens.<eos>"
    assert codec.decode(codec.prompt_tokens("abc", None)) == "[user] abc<eos>"


def test_a_template_file_goes_before_the_configuration(directory: Path) -> None:
    (directory / "chat_template.jinja").write_text("file: {{ messages[0].content }}")
    codec = read(directory)
    assert codec.decode(codec.prompt_tokens("abc", None)) == "file: abc"


def test_without_a_template_the_prompt_is_the_message(directory: Path) -> None:
    configure(directory, chat_template=None)
    codec = read(directory)
    assert codec.decode(codec.prompt_tokens("abc", 8)) == "abc\nthink for 8 tokens."


def test_the_end_token_may_be_written_as_an_object(directory: Path) -> None:
    configure(directory, eos_token={"content": "<eos>", "lstrip": False})
    assert read(directory).eos_token_id == 1


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
