"""From a problem's text to prompt tokens, and from output tokens to an answer."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from runspec.common.errors import UserError
from runspec.common.files import read_bounded

MAX_TOKENIZER_BYTES = 64 * 1024 * 1024
MAX_CONFIG_BYTES = 4 * 1024 * 1024
THINK_END = "</think>"


def user_message(problem: str, target: int | None, length_prompt: str) -> str:
    """The problem and, where a length is asked for, the length prompt on a line of its own."""
    if target is None:
        return problem
    return f"{problem}\n{length_prompt.replace('{target}', str(target))}"


class PromptCodec:
    """A model's tokenizer and chat template.

    Args:
        tokenizer: as `tokenizers` reads tokenizer.json.
        config: tokenizer_config.json, with the chat template where the model has one.
        length_prompt: appended to the problem on a line of its own, `{target}` filled in.
        place: where they come from, for messages.

    Raises:
        UserError: a broken template, or no end token.
    """

    def __init__(
        self, tokenizer: Tokenizer, config: Mapping[str, Any], *, length_prompt: str, place: str
    ) -> None:
        self._tokenizer = tokenizer
        self._config = config
        self._length_prompt = length_prompt
        self._place = place
        source = config.get("chat_template")
        try:
            self._template = None if source is None else _environment().from_string(source)
        except (TemplateError, TypeError) as error:
            raise UserError(f"broken chat template: {error}", place=place) from error
        eos = self._special("eos_token")
        eos_id = None if eos is None else self._tokenizer.token_to_id(eos)
        if eos_id is None:
            raise UserError(
                f"eos_token {eos!r} is not in the vocabulary",
                place=place,
                remedy="name the end token in tokenizer_config.json",
            )
        self.eos_token_id: int = eos_id

    @classmethod
    def read(cls, directory: Path, *, length_prompt: str) -> PromptCodec:
        """Reads tokenizer.json, tokenizer_config.json and, where there is one,
        chat_template.jinja of a model directory.

        Raises:
            UserError: a file that is missing or malformed.
        """
        config = _read_config(directory / "tokenizer_config.json")
        template = directory / "chat_template.jinja"
        if template.is_file():
            source = read_bounded(template, MAX_CONFIG_BYTES).decode(errors="replace")
            config = {**config, "chat_template": source}
        tokenizer = _read_tokenizer(directory / "tokenizer.json")
        return cls(tokenizer, config, length_prompt=length_prompt, place=str(directory))

    def prompt_tokens(self, problem: str, target: int | None) -> list[int]:
        """The message in the chat template, encoded."""
        message = user_message(problem, target, self._length_prompt)
        if self._template is None:
            return self._tokenizer.encode(message).ids
        try:
            rendered = self._template.render(
                messages=[{"role": "user", "content": message}],
                add_generation_prompt=True,
                bos_token=self._special("bos_token"),
                eos_token=self._special("eos_token"),
            )
        except Exception as error:  # a template can divide by zero as well as any program
            raise UserError(f"the chat template fails: {error}", place=self._place) from error
        # The template writes the special tokens itself.
        return self._tokenizer.encode(rendered, add_special_tokens=False).ids

    def encode(self, text: str) -> list[int]:
        """Text as the model would write it: no template, no special tokens around it."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, tokens: Sequence[int]) -> str:
        """All the text there is, special tokens included."""
        return self._tokenizer.decode([int(t) for t in tokens], skip_special_tokens=False)

    def token(self, text: str) -> int:
        """The id of one token.

        Raises:
            UserError: the vocabulary has no such token.
        """
        token = self._tokenizer.token_to_id(text)
        if token is None:
            raise UserError(f"the vocabulary has no token {text!r}", place=self._place)
        return token

    def answer(self, output_tokens: Sequence[int]) -> str | None:
        """The text between the first `</think>` and the end token, None where either is missing.

        An output that was cut off has no answer, whatever it says so far.
        """
        tokens = [int(token) for token in output_tokens]
        size = self._tokenizer.get_vocab_size(with_added_tokens=True)
        if not tokens or tokens[-1] != self.eos_token_id or not all(0 <= t < size for t in tokens):
            return None
        _, think_end, answer = self.decode(tokens[:-1]).partition(THINK_END)
        return answer.strip() if think_end else None

    def _special(self, name: str) -> str | None:
        value = self._config.get(name)
        content = value.get("content") if isinstance(value, dict) else value
        return content if isinstance(content, str) else None


def _environment() -> ImmutableSandboxedEnvironment:
    """Jinja as the tokenizers' authors expect it: these settings are what templates rely on."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def to_json(value: Any, indent: int | None = None) -> str:
        return json.dumps(value, ensure_ascii=False, indent=indent)

    environment.globals["raise_exception"] = raise_exception
    environment.filters["tojson"] = to_json
    return environment


def _read_tokenizer(path: Path) -> Tokenizer:
    remedy = "point at a model directory with a tokenizer.json"
    try:
        data = read_bounded(path, MAX_TOKENIZER_BYTES)
    except OSError as error:
        raise UserError(
            f"cannot read the tokenizer: {error}", place=str(path), remedy=remedy
        ) from error
    try:
        return Tokenizer.from_buffer(data)
    except Exception as error:  # the library raises nothing narrower
        raise UserError(f"not a tokenizer: {error}", place=str(path), remedy=remedy) from error


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(read_bounded(path, MAX_CONFIG_BYTES))
        if isinstance(config, dict):
            return config
        reason = "not a JSON object"
    except (OSError, ValueError) as error:
        reason = str(error)
    raise UserError(
        f"cannot read the tokenizer's configuration: {reason}",
        place=str(path),
        remedy="point at a model directory with a tokenizer_config.json",
    )
