"""Conversations of chat data sets: what a row may hold, and how a chat template renders it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NoReturn

from learner_jax.corpus.documents import require_unicode
from runspec.core.errors import UserError
from runspec.core.tokenizer_files import ASSISTANT, ChatTemplate, Spans

Message = dict[str, Any]
TOOLS = "tools"
"""Column with the tools of a conversation."""
_SAID = ("one-two", "three-four")
"""Texts of the parts that a template is tried on."""
_UNREAD = "five-six"
"""Field of these parts. Templates do not read it; only those that print a whole part show it."""


@dataclass(frozen=True)
class Conversation:
    """Messages, and the schemas of the tools that the assistant may call."""

    messages: list[Message]
    tools: list[dict[str, Any]] | None = None

    def __len__(self) -> int:
        return len(self.messages)


def conversation_of(
    column: str, row: Mapping[str, Any], place: str, *, filled: bool
) -> Conversation:
    """Return the conversation of a row.

    Args:
        column: column of the messages.
        row: columns by name; `tools` is optional.
        place: file and line or row, for messages.
        filled: whether null stands for fields that only other rows have, as in Parquet.

    Raises:
        UserError: there are no messages, or a message or the tools cannot be rendered as text.
    """

    def refuse(what: str, remedy: str) -> NoReturn:
        raise UserError(what, place=place, remedy=remedy)

    value, tools = row.get(column), row.get(TOOLS)
    if not isinstance(value, list) or not all(
        isinstance(each, dict) and isinstance(each.get("role"), str) for each in value
    ):
        remedy = "name the field that holds them with params: {messages: NAME}"
        refuse(f"{column!r} holds no list of messages, each with a role", remedy)
    # Templates ask which fields a message has, so a field that is null is left out.
    messages = [
        {
            key: _without_nulls(said) if filled else said
            for key, said in each.items()
            if said is not None or key == "content"
        }
        for each in value
    ]
    for number, message in enumerate(messages, start=1):
        if fault := _fault(message):
            what = f"message {number} of {column!r}, of role {message['role'][:40]!r}, {fault}"
            refuse(what, "give it text as content, or remove the conversation")
    require_unicode(messages, place)
    try:
        return Conversation(messages, _tools(_without_nulls(tools) if filled else tools))
    except (ValueError, RecursionError) as error:
        what = f"{TOOLS!r} holds no list of objects, or JSON text of one: {error}"
        refuse(what, "write the tools as the chat template reads them, or rename the column")


def _without_nulls(value: Any) -> Any:
    """Remove null fields of objects at every depth; null elements of lists stay."""
    if isinstance(value, dict):
        return {key: _without_nulls(said) for key, said in value.items() if said is not None}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value


def _fault(message: Message) -> str:
    """Return what is wrong with the content of a message; empty if nothing is."""
    content = message.get("content")
    if content is None:
        calls = message["role"] == ASSISTANT and message.get("tool_calls")
        return "" if calls else "has neither content nor tool_calls"
    for part in content if isinstance(content, list) else ():
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        if kind != "text":
            return f"has a part of type {kind!r:.40}, not text"
        if not isinstance(part.get("text"), str):
            return "has a part of type 'text' without a text"
    if isinstance(content, (str, list)):
        return ""
    return f"has content of type {type(content).__name__}, not text"


def _tools(value: Any) -> list[dict[str, Any]] | None:
    """Return the tools of a row; an empty text or list is none.

    Raises:
        ValueError: they are no list of objects, or JSON text of one.
    """
    if isinstance(value, str):
        value = json.loads(value) if value.strip() else None
        json.dumps(value, ensure_ascii=False).encode()  # half a pair has no UTF-8
    if value is not None and not isinstance(value, list):
        raise ValueError(f"it is of type {type(value).__name__}")
    for each in value or ():
        if not isinstance(each, dict):
            raise ValueError(f"an element is of type {type(each).__name__}")
    return value or None


def spans_of(template: ChatTemplate, conversation: Conversation) -> Spans:
    """Render a conversation; see `ChatTemplate.spans`.

    Content goes to the template as text or as a list of parts, whichever it renders. A null content
    beside tool calls is an empty text for a template that would write "None".

    Raises:
        UserError: see `ChatTemplate.spans`.
    """
    messages = [_fitting(template, message) for message in conversation.messages]
    text, spans = template.spans(messages, conversation.tools)
    if "None" in text and any(each.get("content") is None for each in messages):
        blank = [{**each, "content": each.get("content") or ""} for each in messages]
        of_blank = template.spans(blank, conversation.tools)
        if of_blank[0].count("None") < text.count("None"):
            return of_blank
    return text, spans


def _fitting(template: ChatTemplate, message: Message) -> Message:
    """Return a message whose content has a form that the template renders."""
    role, content = message["role"], message.get("content")
    if isinstance(content, list) and not renders(template, role, parts=True):
        return {**message, "content": "".join(part["text"] for part in content)}
    if isinstance(content, str) and only_parts(template, role):
        return {**message, "content": [{"type": "text", "text": content}]}
    return message


def only_parts(template: ChatTemplate, role: str) -> bool:
    """Return whether a template renders a role's content as a list of parts, but not as text."""
    return not renders(template, role, parts=False) and renders(template, role, parts=True)


@lru_cache(256)
def renders(template: ChatTemplate, role: str, *, parts: bool) -> bool:
    """Return whether a template renders a role's content that is text, or a list of parts.

    A conversation with such a message is rendered.
    """
    listed = [{"type": "text", "text": said, _UNREAD: _UNREAD} for said in _SAID]
    tried: Any = {"role": role, "content": listed if parts else "".join(_SAID)}
    user, assistant = ({"role": role, "content": "x"} for role in ("user", ASSISTANT))
    talks: Any = {"system": [tried, user], "user": [tried], ASSISTANT: [user, tried]}
    try:
        text = template.render(talks.get(role, [user, assistant, tried]))
    except UserError:
        return False
    return all(said in text for said in _SAID) and _UNREAD not in text
