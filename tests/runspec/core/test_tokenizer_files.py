"""What the assistant says in a conversation, by a model's chat template."""

from __future__ import annotations

from typing import Any

import pytest

from runspec.core.errors import UserError
from runspec.core.tokenizer_files import ChatTemplate

PLAIN = """\
{%- for m in messages %}{{ '<' + m.role + '>' + m.content + '</s>\\n' }}{% endfor %}
{%- if add_generation_prompt %}<assistant>{% endif %}
"""
THOUGHTS = "(m.content if loop.last or m.role != 'assistant' else '') +"
"""Of earlier turns they are left out, as reasoning models have it."""
MARKED = """\
{%- for m in messages %}
{{- '<' + m.role + '>' }}
{%- if m.role == 'assistant' %}{% generation %}{{ m.content + '</s>' }}{% endgeneration %}
{%- else %}{{ m.content + '</s>' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<assistant>{% endif %}
"""
TALK = [
    {"role": "system", "content": "Add."},
    {"role": "user", "content": "1 + 2?"},
    {"role": "assistant", "content": "add(1, 2)"},
    {"role": "tool", "content": "3"},
    {"role": "assistant", "content": "3 \u00e9t\u00e9"},
    {"role": "user", "content": "3 \u00e9t\u00e9"},
]


def said(template: str, talk: list[dict[str, Any]]) -> list[str]:
    text, spans = ChatTemplate(template, {}, "model").spans(talk)
    return [text[begin:stop] for begin, stop in spans]


def test_the_assistants_turns_are_found_with_and_without_a_mark() -> None:
    # given turns of all roles, the last two with the same words; only the assistant's are found
    assert said(MARKED, TALK) == ["add(1, 2)</s>", "3 \u00e9t\u00e9</s>"]
    # without a mark a turn reaches up to the next
    assert said(PLAIN, TALK) == ["add(1, 2)</s>\n", "3 \u00e9t\u00e9</s>\n"]
    for template in (MARKED, PLAIN):
        assert said(template, TALK[:2]) == []


def test_marks_do_not_change_the_text() -> None:
    template = ChatTemplate(MARKED, {}, "model")
    text, _ = template.spans(TALK)
    assert template.render(TALK) == f"{text}<assistant>"
    assert text.startswith("<system>Add.</s><user>1 + 2?</s><assistant>add(1, 2)</s><tool>3</s>")


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (PLAIN.replace("m.content +", THOUGHTS), "3 .* more follows"),
        # the turn is asked for in other words than it has
        (PLAIN.replace("%}<assistant>{", "%}<assistant><think>{"), "3 .* than it asks for it"),
    ],
)
def test_turns_that_cannot_be_told_are_refused(template: str, reason: str) -> None:
    with pytest.raises(UserError, match=f"the chat template renders message {reason}") as error:
        said(template, TALK)
    assert error.value.place == "model"
    assert "{% generation %}" in error.value.remedy


@pytest.mark.parametrize("content", ["\ue0f0", "a\ue0f1b", "\ue0f0both\ue0f1", "\ue0f1\ue0f0"])
@pytest.mark.parametrize("role", ["user", "assistant"])
def test_a_message_cannot_hold_the_mark(role: str, content: str) -> None:
    talk = [*TALK, {"role": role, "content": content}]
    with pytest.raises(UserError, match=f"U\\+{ord(content.strip('ab')[0]):04X}, which is res"):
        said(MARKED, talk)
    # a template that has no mark takes any character
    assert len(said(PLAIN, talk)) == 2 + (role == "assistant")


@pytest.mark.parametrize(
    "template",
    [
        "{% generation %}{% generation %}a{% endgeneration %}{% endgeneration %}",
        "{% for m in messages %}{% generation %}a{% break %}{% endgeneration %}{% endfor %}",
        "{% set x %} {% generation %} a {% endgeneration %}{% endset %}{{ x | length }}{{ x }}",
    ],
    ids=["nested", "left", "changed"],
)
def test_a_mark_that_does_not_enclose_text_is_refused(template: str) -> None:
    with pytest.raises(UserError, match=r"has {% generation %} within itself") as error:
        said(template, TALK)
    assert (error.value.place, bool(error.value.remedy)) == ("model", True)


def test_a_template_must_have_the_assistants_message() -> None:
    for template in (PLAIN, MARKED):
        ChatTemplate(template, {}, "model").require_assistant_message()
    roles = "{% for m in messages %}{{ m.role }}{% endfor %}"
    for template in (roles, MARKED.replace("{{ m.content + '</s>' }}{% end", "{% end")):
        with pytest.raises(UserError, match="leaves out or does not mark") as error:
            ChatTemplate(template, {}, "model").require_assistant_message()
        assert (error.value.place, bool(error.value.remedy)) == ("model", True)


def test_a_template_that_fails_is_named() -> None:
    for template in ("{{ raise_exception('no tools') }}", "{% generation %}{{ 1 / 0 }}"):
        with pytest.raises(UserError, match="chat template") as error:
            said(template, TALK)
        assert error.value.place == "model"
