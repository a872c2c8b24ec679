"""Which tokens of a conversation are trained: by the chat template, with and without its marks."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, processors
from transformers import PreTrainedTokenizerFast

from learner_jax.corpus.packed import Corpus
from runspec.core.errors import UserError
from tests.learner_jax.corpus.corpora import (
    document_spec,
    model_dir,
    opened,
    segments,
    tokenizer_of,
)

Json = dict[str, Any]
MARKED = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.role == 'assistant' %}{% generation %}
{{- message.content or '' }}
{%- for call in message.tool_calls or [] %}{{ '<call>' + call.function | tojson }}{% endfor %}
{{- '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}
{%- else %}{{ message.content + '<|im_end|>\\n' }}{%- endif %}
{%- endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""
BLANK = """\
{%- for message in messages %}
{%- if message.role == 'assistant' %}A: {% generation %}{{ message.content }}<|im_end|>
{%- endgeneration %}{{ '\\n' }}{%- else %}{{ 'Q: ' + message.content + '\\n' }}{%- endif %}
{%- endfor %}{% if add_generation_prompt %}{{ 'A: ' }}{% endif %}
"""
PLAIN = MARKED.replace("{% generation %}", "").replace("{% endgeneration %}", "")
CHANGING = """\
{%- for message in messages %}
{{- message.role + ': ' }}{% if loop.last %}{{ '(last) ' }}{% endif %}{{ message.content + '\\n' }}
{%- endfor %}{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}
"""
SILENT = """\
{%- for message in messages %}{% if message.role != 'assistant' %}{{ message.content }}{% endif %}
{%- endfor %}
"""
CALL = {"type": "function", "function": {"name": "sun", "arguments": {"rise": 1}}}
CONVERSATION: list[Json] = [
    {"role": "system", "content": "the moon"},
    {"role": "user", "content": "naïve 数学?"},
    {"role": "assistant", "content": "the 🙂", "tool_calls": [CALL]},
    {"role": "tool", "content": "the assistant says the sun"},
    {"role": "assistant", "content": "the sun"},
    {"role": "user", "content": "and the sun"},
    {"role": "assistant", "content": "the sun"},
]
SHORT: list[Json] = [
    {"role": "user", "content": "the"},
    {"role": "assistant", "content": "sun and moon"},
]


TEXT = """\
{%- if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{{ m.role + ': ' }}
{%- if m.role == 'assistant' %}{% generation %}{{ m.content }}{% for c in m.tool_calls or [] %}
{{- c | tojson }}{% endfor %}{{ '<eos>' }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}
{%- endfor %}
"""
PARTS = TEXT.replace("{{ m.content }}", "{% for p in m.content %}{{ p.text }}|{% endfor %}")
STRING = "[{'text': '-' + m.content}] if m.content is string else m.content"
EITHER = PARTS.replace("in m.content", f"in ({STRING})")
FIRST = TEXT.replace("m.content", "(m.content if m.content is string else m.content[0].text)")
LISTED = TEXT.replace("m.content", "(m.content | tojson if m.content is iterable else 0)")
# of the user parts, of the assistant text
MIXED = "{% else %}".join((TEXT.split("{% else %}")[0], PARTS.split("{% else %}")[1]))
FOUR = [{"type": "text", "text": "fo"}, {"type": "text", "text": "ur", "cache": 1}]


def corpus_of(
    folder: Path, template: str | None, *conversations: object, row: int = 512, **options: Any
) -> Corpus:
    lines = "".join(json.dumps({"messages": each}) + "\n" for each in conversations)
    (folder / "a.jsonl").write_text(lines)
    source = {"name": "a", "kind": "jsonl", "uri": str(folder / "a.jsonl")}
    spec = document_spec([source], row=row, kind="sft")
    return opened(folder, spec, model_dir(folder / "model", template, **options))


def tokens_and_mask(corpus: Corpus) -> tuple[list[int], list[int]]:
    """The only document, and which of its tokens are trained."""
    [(tokens, targets, weights)] = segments(corpus.read(0, 1))
    mask = [0] + [int(target >= 0) for target in targets[:-1]]
    trained = [token for token, kept in zip(tokens, mask, strict=True) if kept]
    assert trained == [target for target in targets if target >= 0]
    assert [weight > 0 for weight in weights] == [target >= 0 for target in targets]
    assert corpus.totals.trained_tokens == len(trained)
    return tokens, mask


@pytest.mark.parametrize("conversation", [CONVERSATION, SHORT], ids=["long", "short"])
@pytest.mark.parametrize("template", [MARKED, BLANK], ids=["marked", "blank"])
def test_marked_templates_give_the_mask_of_transformers(
    template: str, conversation: list[Json], tmp_path: Path
) -> None:
    # `BLANK` marks what follows a blank, which is in one token with the first word
    corpus = corpus_of(tmp_path, template, conversation)
    theirs = PreTrainedTokenizerFast.from_pretrained(str(tmp_path / "model"))
    found = theirs.apply_chat_template(
        conversation, return_dict=True, return_assistant_tokens_mask=True
    )
    assert 0 < sum(found["assistant_masks"]) < len(found["input_ids"])
    assert tokens_and_mask(corpus) == (found["input_ids"], found["assistant_masks"])


def test_without_marks_the_assistants_part_is_what_rendering_adds(tmp_path: Path) -> None:
    # given a template without marks, and text of the assistant's that others say too
    corpus = corpus_of(tmp_path, PLAIN, CONVERSATION, end="<|im_end|>")
    tokens, mask = tokens_and_mask(corpus)
    # then the assistant's turns alone are trained, to the end token, without the line feed
    theirs = tokenizer_of(tmp_path / "model")
    spans, inside = [], False
    for token, kept in zip(tokens, mask, strict=True):
        if kept and not inside:
            spans.append([])
        if kept:
            spans[-1].append(token)
        inside = bool(kept)
    call = '<call>{"name": "sun", "arguments": {"rise": 1}}'
    assert [theirs.decode(span, skip_special_tokens=False) for span in spans] == [
        f"the 🙂{call}<|im_end|>",
        "the sun<|im_end|>",
        "the sun<|im_end|>",
    ]
    marked = corpus_of(tmp_path, MARKED, CONVERSATION)
    assert tokens_and_mask(marked) == (tokens, mask)
    # and the bytes are those of the text, without special tokens
    said = len(f"the 🙂{call}the sunthe sun".encode())
    assert corpus.totals.bytes_per_token * corpus.totals.trained_tokens == pytest.approx(said)


def test_white_space_that_the_offsets_leave_out_is_trained(tmp_path: Path) -> None:
    # given a tokenizer that trims offsets, as Llama 3's does
    talk = [SHORT[0], {"role": "assistant", "content": "  the  sun  "}]
    expected = tokens_and_mask(corpus_of(tmp_path, MARKED, talk))
    tokenizer = Tokenizer.from_file(str(tmp_path / "model" / "tokenizer.json"))
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    tokenizer.save(str(tmp_path / "model" / "tokenizer.json"))
    # then what is trained is the same
    source = {"name": "a", "kind": "jsonl", "uri": str(tmp_path / "a.jsonl")}
    spec = document_spec([source], row=512, kind="sft")
    assert tokens_and_mask(opened(tmp_path, spec, tmp_path / "model")) == expected


def test_conversations_that_cannot_be_trained_are_left_out_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    # given a long one, one of the user alone, one where the assistant says nothing, an empty one
    silent = [SHORT[0], {"role": "assistant", "content": ""}]
    with caplog.at_level(logging.INFO):
        corpus = corpus_of(
            tmp_path, BLANK.replace("<|im_end|>", ""), SHORT, SHORT * 9, SHORT[:1], silent, [],
            row=32,
        )  # fmt: skip
    # then one is left
    assert corpus.totals.documents == 1
    counts = corpus.counts
    assert (counts.too_long, counts.without_assistant, counts.empty) == (1, 2, 1)
    assert "1 conversations longer than a row left out" in caplog.text
    assert "2 conversations without the assistant left out" in caplog.text
    # and the log says that the template has no end token
    assert "no trained token is the end token" in caplog.text


def test_sft_trains_all_of_plain_text(tmp_path: Path) -> None:
    # given text beside conversations, longer than a row
    (tmp_path / "a.txt").write_text("the sun and the moon " * 19 + "\n")
    (tmp_path / "b.jsonl").write_text(json.dumps({"messages": SHORT}) + "\n")
    sources = [
        {"name": "a", "kind": "text", "uri": str(tmp_path / "a.txt")},
        {"name": "b", "kind": "jsonl", "uri": str(tmp_path / "b.jsonl"), "weight": 2.0},
    ]
    model = model_dir(tmp_path / "model", MARKED)
    corpus = opened(tmp_path, document_spec(sources, row=48, kind="sft"), model)
    by_weight: dict[float, int] = {1.0: 0, 2.0: 0}
    for tokens, _, weights in segments(corpus.read(0, corpus.rows)):
        assert sum(weight == 1.0 for weight in weights) in (0, len(tokens) - 1)
        for weight in weights:
            if weight:
                by_weight[weight] += 1
    # then it is cut, and every token but the first is trained
    text = tokenizer_of(model)
    assert corpus.totals.cut == 1
    assert by_weight[1.0] == len(text.encode("the sun and the moon " * 19).ids)  # + end - first
    assert by_weight[2.0] == len(text.encode("sun and moon<|im_end|>").ids)


@pytest.mark.parametrize(
    ("template", "conversation", "message"),
    [
        (None, SHORT, "model: conversations need a chat template"),
        (CHANGING, CONVERSATION[4:] + SHORT, "message 1 otherwise when more follows"),
        (SILENT, SHORT, "the chat template does not render what the assistant says"),
        ("{{ raise_exception('no') }}", SHORT, "the chat template fails: no"),
        (MARKED, [{"role": "assistant", "content": "\ue0f0"}], "the character U+E0F0"),
    ],
)  # fmt: skip
def test_what_cannot_be_rendered_is_named(
    template: str | None, conversation: object, message: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError) as caught:
        corpus_of(tmp_path, template, SHORT if template == MARKED else [], conversation)
    said = str(caught.value)
    assert message in said and "remedy: " in said
    if template is not None:
        assert f"{tmp_path}/a.jsonl:2" in said
    if template not in (None, MARKED):
        assert f"{tmp_path}/model" in said


@pytest.mark.parametrize(
    ("template", "content", "expected"),
    [
        (TEXT, "four", "user: fourassistant: four<eos>"),
        (TEXT, FOUR, "user: fourassistant: four<eos>"),
        (FIRST, FOUR, "user: fourassistant: four<eos>"),
        (LISTED, FOUR, 'user: "four"assistant: "four"<eos>'),
        (EITHER, "four", "user: -four|assistant: -four|<eos>"),
        (EITHER, FOUR, "user: fo|ur|assistant: fo|ur|<eos>"),
        (PARTS, "four", "user: four|assistant: four|<eos>"),
        (PARTS, FOUR, "user: fo|ur|assistant: fo|ur|<eos>"),
        (MIXED, FOUR, "user: fo|ur|assistant: four<eos>"),
    ],
)
def test_content_is_text_or_parts_as_the_template_takes_it(
    template: str, content: object, expected: str, tmp_path: Path
) -> None:
    talk = [{"role": role, "content": content} for role in ("user", "assistant")]
    tokens, mask = tokens_and_mask(corpus_of(tmp_path, template, talk))
    text = tokenizer_of(tmp_path / "model")
    assert text.decode(tokens, skip_special_tokens=False) == expected
    trained = [token for token, kept in zip(tokens, mask, strict=True) if kept]
    said = text.decode(trained, skip_special_tokens=False)
    assert said == expected.partition("assistant: ")[2]


@pytest.mark.parametrize(("tools", "said"), [([CALL], f"[{json.dumps(CALL)}]"), (None, "")])
def test_a_call_without_content_trains_no_none_and_tools_are_rendered(
    tools: object, said: str, tmp_path: Path
) -> None:
    talk = [{"role": "user", "content": "None"}, {**CONVERSATION[2], "content": None}]
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": talk, "tools": tools}))
    source = {"name": "a", "kind": "jsonl", "uri": str(tmp_path / "a.jsonl")}
    spec = document_spec([source], row=512, kind="sft")
    model = model_dir(tmp_path / "model", TEXT)
    tokens, _ = tokens_and_mask(opened(tmp_path, spec, model))
    rendered = tokenizer_of(model).decode(tokens, skip_special_tokens=False)
    assert rendered == f"{said}user: Noneassistant: {json.dumps(CALL)}<eos>"
