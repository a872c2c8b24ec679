"""Tokenizer files of a model directory, read with limits, and the chat template among them.

The template is rendered by sandboxed jinja2 with the settings that its author expects.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import accumulate
from pathlib import Path
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from runspec.core.errors import UserError
from runspec.core.files import read_bounded, read_json

MAX_TOKENIZER_BYTES = 64 * 1024 * 1024
MAX_CONFIG_BYTES = 4 * 1024 * 1024
_SPECIAL_KINDS = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
_DEFAULT = "default"
ASSISTANT = "assistant"
"""Role of the model's messages."""
TEMPLATE_DATE = datetime(2024, 7, 26, tzinfo=UTC)
"""What `strftime_now` gives on every day: the date of Llama 3's templates without a clock."""
_BEGIN, _END = "\ue0f0", "\ue0f1"
"""Private-use characters around what `{% generation %}` encloses."""


@dataclass(frozen=True)
class TokenizerFiles:
    """tokenizer.json, and tokenizer_config.json with the chat template if there is one."""

    tokenizer: Tokenizer
    config: Mapping[str, Any]
    place: str
    """Directory of the files, for messages."""

    @classmethod
    def read(cls, directory: Path) -> TokenizerFiles:
        """Read tokenizer.json, tokenizer_config.json and chat_template.jinja.

        The last one overrides the template in the configuration.

        Raises:
            UserError: a file is missing or malformed.
        """
        config = read_json(
            directory / "tokenizer_config.json",
            MAX_CONFIG_BYTES,
            "the tokenizer's configuration",
            remedy="point at a model directory with a tokenizer_config.json",
        )
        template = directory / "chat_template.jinja"
        if template.is_file():
            source = read_bounded(template, MAX_CONFIG_BYTES).decode(errors="replace")
            config = {**config, "chat_template": source}
        return cls(read_tokenizer(directory / "tokenizer.json"), config, str(directory))

    @property
    def special_tokens(self) -> dict[str, str]:
        """Text of each special token in the configuration, by name, for example `bos_token`."""
        found = {}
        for kind in _SPECIAL_KINDS:
            value = self.config.get(f"{kind}_token")
            content = value.get("content") if isinstance(value, dict) else value
            if isinstance(content, str):
                found[f"{kind}_token"] = content
        return found

    def special_id(self, name: str) -> int | None:
        """Return the id of a special token, for example `eos_token`; None if there is none."""
        text = self.special_tokens.get(name)
        number = None if text is None else self.tokenizer.token_to_id(text)
        return None if number is None else int(number)


def read_tokenizer(path: Path) -> Tokenizer:
    """Read a tokenizer.json.

    Raises:
        UserError: it is missing or no tokenizer.
    """
    try:
        data = read_bounded(path, MAX_TOKENIZER_BYTES)
    except OSError as error:
        raise _unusable(f"cannot read the tokenizer: {error}", str(path)) from error
    return tokenizer_of(data, str(path))


def tokenizer_of(data: bytes, place: str) -> Tokenizer:
    """Return the tokenizer of a tokenizer.json.

    Raises:
        UserError: it is none.
    """
    try:
        tokenizer = Tokenizer.from_buffer(data)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # nothing narrower; a panic in Rust is no Exception
        raise _unusable(f"not a tokenizer: {error}", place) from error
    # A file may ask for both; transformers, too, leaves them out unless its caller asks.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _unusable(thing: str, place: str) -> UserError:
    remedy = "point at a model directory with a tokenizer.json"
    return UserError(thing, place=place, remedy=remedy)


Objects = Sequence[Mapping[str, Any]]
"""Turns of a conversation, of `role` and `content`; or schemas of tools."""
Spans = tuple[str, list[tuple[int, int]]]
"""Text, and begin and end of parts of it."""


class ChatTemplate:
    """Chat template of a model, rendered up to the start of the model's turn.

    `strftime_now` gives `TEMPLATE_DATE`, so that every process renders the same on every day.

    Args:
        source: the template's text.
        special_tokens: special tokens by the names in the template, for example `bos_token`.
        place: file or directory of the template, for messages.

    Raises:
        UserError: it does not parse.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str], place: str) -> None:
        self.source = source
        self.special_tokens = special_tokens
        self._place = place
        try:
            self._template = _environment().from_string(source)
        except (TemplateError, TypeError) as error:
            raise UserError(f"broken chat template: {error}", place=place) from error

    @classmethod
    def of(cls, files: TokenizerFiles) -> ChatTemplate | None:
        """Return the template of a model directory, the one called `default` if there are several.

        Raises:
            UserError: it does not parse, or none of several is called `default`.
        """
        said = files.config.get("chat_template")
        if isinstance(said, list):
            named = {
                entry.get("name"): entry.get("template")
                for entry in said
                if isinstance(entry, dict)
            }
            if _DEFAULT not in named:
                raise UserError(
                    f"none of the chat templates {', '.join(map(str, named))} is called default",
                    place=files.place,
                    remedy="put the template to use into chat_template.jinja",
                )
            said = named[_DEFAULT]
        return None if said is None else cls(said, files.special_tokens, files.place)

    def render(self, messages: Objects, tools: Objects | None = None) -> str:
        """Render a conversation as text, up to the start of the model's turn.

        Args:
            messages, tools: as of `spans`.

        Raises:
            UserError: the template fails or refuses.
        """
        return self._rendered(messages, tools, prompt=True)

    @property
    def marks_assistant(self) -> bool:
        """Whether the template says by `{% generation %}` what the assistant says."""
        return re.search(r"{%-?\s*generation\s*-?%}", self.source) is not None

    def spans(self, messages: Objects, tools: Objects | None = None) -> Spans:
        """Render a whole conversation, and return what the assistant says as spans of characters.

        A template marks it with `{% generation %}`. Of one without that mark, the assistant's part
        of message k is what the rendering of messages[: k + 1] has beyond that of messages[:k] up
        to the start of the model's turn.

        Args:
            messages: of `role` and `content`, and whatever else the template reads.
            tools: schemas of tools, for a template that renders them.

        Raises:
            UserError: the template fails, or renders the beginning of a conversation otherwise
                once more follows, or a message holds a character that stands for the mark.
        """
        if self.marks_assistant:
            return self._marked(messages, tools)
        text, found = self._rendered(messages, tools), []
        for number, message in enumerate(messages):
            if message.get("role") != ASSISTANT:
                continue
            before = self._rendered(messages[:number], tools, prompt=True)
            after = self._rendered(messages[: number + 1], tools)
            if not (after.startswith(before) and text.startswith(after)):
                when = "when more follows" if after.startswith(before) else "than it asks for it"
                raise UserError(
                    f"the chat template renders message {number + 1} otherwise {when}",
                    place=self._place,
                    remedy="mark the assistant's part in the template with {% generation %} and "
                    "{% endgeneration %}",
                )
            found.append((len(before), len(after)))
        return text, found

    def require_assistant_message(self, *, parts: bool = False) -> None:
        """Refuse a template that does not tell what the assistant says.

        Args:
            parts: whether the template takes the content as a list of parts, not as text.

        Raises:
            UserError: see `spans`, or it leaves the assistant's message out.
        """
        said = "one-two-three"
        content = [{"type": "text", "text": said}] if parts else said
        text, found = self.spans(
            [{"role": "user", "content": "four"}, {"role": ASSISTANT, "content": content}]
        )
        if not any(said in text[begin:stop] for begin, stop in found):
            raise UserError(
                "the chat template leaves out or does not mark what the assistant says",
                place=self._place,
                remedy="enclose it in the template with {% generation %} and {% endgeneration %}",
            )

    def _marked(self, messages: Objects, tools: Objects | None) -> Spans:
        """See `spans`."""
        text = self._rendered(messages, tools)
        if held := re.search(f"[{_BEGIN}{_END}]", text):
            raise UserError(
                f"a message holds the character U+{ord(held[0]):04X}, which is reserved",
                remedy="remove it from the data",
            )
        pieces = re.split(f"([{_BEGIN}{_END}])", self._rendered(messages, tools, mark=True))
        parts, marks = pieces[::2], pieces[1::2]
        if marks != [_BEGIN, _END] * (len(marks) // 2) or "".join(parts) != text:
            raise UserError(
                "the chat template has {% generation %} within itself, leaves it by a break, or "
                "changes what it encloses",
                place=self._place,
                remedy="enclose only what the assistant says",
            )
        ends = list(accumulate(map(len, parts)))
        return text, list(zip(ends[:-1:2], ends[1::2], strict=True))

    def _rendered(
        self,
        messages: Objects,
        tools: Objects | None = None,
        *,
        prompt: bool = False,
        mark: bool = False,
    ) -> str:
        try:
            return self._template.render(
                messages=messages,
                tools=tools,
                documents=None,
                add_generation_prompt=prompt,
                mark_generation=mark,
                **self.special_tokens,
            )
        except Exception as error:  # a template can raise anything, for example by a division
            raise UserError(
                f"the chat template fails: {error}",
                place=self._place,
                remedy="put a template that renders it into chat_template.jinja",
            ) from error

    def after_assistant(self) -> str:
        """Return what follows the assistant's words in a conversation that ends with them.

        Raises:
            UserError: the template fails.
        """
        said = "one-two-three"
        _, found, rest = self._rendered(
            [{"role": "user", "content": "four"}, {"role": ASSISTANT, "content": said}]
        ).rpartition(said)
        return rest if found else ""

    def require_system_message(self) -> None:
        """Refuse a template without support for a system message.

        Raises:
            UserError: it fails on one, or silently leaves it out.
        """
        said = "one-two-three"
        try:
            text = self.render(
                [{"role": "system", "content": said}, {"role": "user", "content": "four"}]
            )
        except UserError as error:
            self.render([{"role": "user", "content": "four"}])  # a failure that is not about it
            reason = f"refuses a system message: {error.thing.partition(': ')[2]}"
        else:
            if said in text:
                return
            reason = "leaves the system message out"
        raise UserError(
            f"the chat template {reason}",
            place=self._place,
            remedy="remove data.system_prompt and set data.length_prompt_role: user",
        )


class _Generation(Extension):
    """`{% generation %}` marks the model's text: with `mark_generation`, between two characters."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return [_mark(_BEGIN), *body, _mark(_END)]


def _mark(mark: str) -> nodes.Node:
    chosen = nodes.CondExpr(
        nodes.Name("mark_generation", "load"), nodes.Const(mark), nodes.Const("")
    )
    return nodes.Output([chosen])


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.loopcontrols", _Generation],
    )

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def to_json(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        """Return plain JSON; jinja2's own filter would escape it for HTML.

        It takes the options of transformers' filter. Others of `json.dumps` call what they get.
        """
        return json.dumps(
            value,
            ensure_ascii=bool(ensure_ascii),
            indent=indent,
            separators=separators,
            sort_keys=bool(sort_keys),
        )

    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = TEMPLATE_DATE.strftime
    environment.filters["tojson"] = to_json
    return environment
