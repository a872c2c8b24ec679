"""Chat templates: sandboxed jinja2 with the settings that their authors expect."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from runspec.core.errors import UserError
from sampler.tasks.tokenizer_files import TokenizerFiles

_DEFAULT = "default"


class Message(TypedDict):
    """One turn of a conversation."""

    role: str
    content: str


class ChatTemplate:
    """A model's template, rendered for the model's turn to begin.

    What depends on the day it is rendered (`strftime_now`) is not offered: templates that ask
    whether it is defined take a fixed date, and every process renders the same.

    Args:
        source: the template's text.
        special_tokens: `bos_token` and its like, as the template calls them.
        place: where it comes from, for messages.

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
        """The template of a model directory; of several with names the one called `default`.

        Raises:
            UserError: it does not parse, or none of several is the default.
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
                    f"of the chat templates {', '.join(map(str, named))} none is the default",
                    place=files.place,
                    remedy="put the one to use into chat_template.jinja",
                )
            said = named[_DEFAULT]
        return None if said is None else cls(said, files.special_tokens, files.place)

    def render(self, messages: Sequence[Message]) -> str:
        """The conversation as text, up to where the model's turn begins.

        Raises:
            UserError: the template fails or refuses.
        """
        try:
            return self._template.render(
                messages=messages,
                tools=None,
                documents=None,
                add_generation_prompt=True,
                **self.special_tokens,
            )
        except Exception as error:  # a template can divide by zero as well as any program
            raise UserError(f"the chat template fails: {error}", place=self._place) from error

    def require_system_message(self) -> None:
        """Refuses a template that has no place for a system's message.

        Raises:
            UserError: it fails on one, or leaves it out in silence.
        """
        said = "one-two-three"
        try:
            text = self.render(
                [{"role": "system", "content": said}, {"role": "user", "content": "four"}]
            )
        except UserError as error:
            reason = f"refuses a system message: {error.thing.partition(': ')[2]}"
        else:
            if said in text:
                return
            reason = "leaves the system message out"
        raise UserError(
            f"the chat template {reason}",
            place=self._place,
            remedy="take data.system_prompt out, and set data.length_prompt_role: user",
        )


class _Generation(Extension):
    """`{% generation %}` marks what the model wrote, for training masks; prompts need no mask."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.loopcontrols", _Generation],
    )

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def to_json(value: Any, **options: Any) -> str:
        """JSON as it is, where jinja2's own filter would write it for HTML."""
        return json.dumps(value, **{"ensure_ascii": False, **options})

    environment.globals["raise_exception"] = raise_exception
    environment.filters["tojson"] = to_json
    return environment
