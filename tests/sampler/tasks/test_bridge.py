"""Bridges: what stands between turns is what the template writes there, whatever is said."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import WordLevel

from runspec.core.errors import UserError
from runspec.core.schema import Data
from runspec.core.tokenizer_files import ChatTemplate, TokenizerFiles
from sampler.tasks.bridge import Bridge
from sampler.tasks.environments.calculator import Calculator
from sampler.tasks.prompts import PromptCodec

HEADERS = ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
SPECIAL = ["<|im_start|>", "<|im_end|>", "<eos>", "<unk>", *HEADERS]
CHATML = """\
{%- if tools %}{{ '<|im_start|>system\\n' }}{% for t in tools %}{{ t | tojson }}{% endfor %}\
{{ '<|im_end|>\\n' }}{% endif %}
{%- for m in messages %}
{%- if m.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
{{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}
{%- else %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
"""Of Qwen's kind: observations in one turn of the user."""
LLAMA = """\
{%- for m in messages -%}
<|start_header_id|>{{ 'ipython' if m.role == 'tool' else m.role }}<|end_header_id|>

{{ m.content | tojson if m.role == 'tool' else m.content }}<|eot_id|>
{%- endfor %}
{%- if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>

{% endif %}"""
"""Of Llama 3's kind."""
TOOLS = [{"role": "tool", "content": "7"}, {"role": "tool", "content": "8 or 9"}]
OF_RENDERERS = {
    "Qwen3Renderer": (
        *(CHATML, "<|im_end|>", TOOLS),
        "\n<|im_start|>user\n<tool_response>\n7\n</tool_response>\n<tool_response>\n8 or 9\n"
        "</tool_response><|im_end|>\n<|im_start|>assistant\n",
    ),
    "Llama3Renderer": (
        *(LLAMA, "<|eot_id|>", TOOLS),
        '<|start_header_id|>ipython<|end_header_id|>\n\n"7"<|eot_id|><|start_header_id|>ipython'
        '<|end_header_id|>\n\n"8 or 9"<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n',
    ),
}
"""Template, end token, observations, and what `renderers` 0.1.12 puts after the turn that called
(`bridge_to_next_turn`, recorded in an environment of its own)."""
USER = [{"role": "user", "content": "eleven"}]
REFUSED = {
    "thinking is stripped from earlier turns": (
        CHATML.replace(
            "m.role + '\\n' + m.content", "m.role + '\\n' + m.content.split('</think>')[-1]"
        ),
        "first turn otherwise",
    ),
    "the words are stripped": (
        CHATML.replace("{%- for m in messages %}", "{%- for m in messages if m.role != 'tool' %}"),
        "leaves out or changes a message of role 'tool'",
    ),
    "earlier turns change": (
        CHATML.replace(
            "'<|im_start|>' + m.role", "'<|im_start|>' + messages|length|string + m.role"
        ),
        "otherwise",
    ),
    "what stands between depends on the words": (
        CHATML.replace("'\\n<tool_response>\\n'", "messages[1].content|length|string + '\\n'"),
        "other text between turns",
    ),
    "a turn has another end": (CHATML.replace("<|im_end|>", "<eos>"), "does not end the model's"),
}


def tokenizer() -> Tokenizer:
    """Special tokens, and every other character."""
    tokens = [*SPECIAL, *map(chr, range(9, 127))]
    made = Tokenizer(WordLevel({t: i for i, t in enumerate(tokens)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Split(Regex("(?m)."), "isolated")
    made.decoder = decoders.Fuse()
    made.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    return made


def bridge(template: str = CHATML, prefill: str = "", tools=(), end: str = SPECIAL[1]) -> Bridge:
    return Bridge(
        tokenizer(),
        ChatTemplate(template, {}, "here"),
        SPECIAL.index(end),
        opening=USER,
        tools=tools,
        prefill=prefill,
        place="here",
    )


WORDS = st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=20)


@given(st.lists(st.tuples(WORDS, st.lists(WORDS, min_size=1, max_size=3)), min_size=1, max_size=3))
def test_the_sequence_is_what_the_template_renders_of_the_whole_conversation(turns):
    # given a conversation of turns with observations
    made, encode = bridge(), tokenizer()
    template = ChatTemplate(CHATML, {}, "here")
    messages = [*USER]
    tokens = encode.encode(template.render(messages), add_special_tokens=False).ids
    # when it grows by what the model said, its end token, and the bridge
    for said, observed in turns:
        seen = [{"role": "tool", "content": text} for text in observed]
        tokens += [*encode.encode(said).ids, 1, *made.tokens(seen, ended=True, most=99)]
        messages += [{"role": "assistant", "content": said}, *seen]
    # then it is the rendering, where no text holds a special token
    assert tokens == encode.encode(template.render(messages), add_special_tokens=False).ids


def test_a_turn_that_was_cut_gets_its_end_and_a_long_observation_is_cut():
    made, seen = bridge(), [{"role": "tool", "content": "x" * 50}]
    whole, cut = made.tokens(seen, ended=True, most=50), made.tokens(seen, ended=False, most=50)
    assert cut == [1, *whole]
    assert len(made.tokens(seen, ended=True, most=8)) == len(whole) - 42


@pytest.mark.parametrize("name", OF_RENDERERS)
def test_what_stands_between_turns_is_what_renderers_puts_there(name):
    template, end, seen, text = OF_RENDERERS[name]
    made, encode = bridge(template, end=end), tokenizer()
    between = made.tokens(seen, ended=True, most=99)
    assert between == encode.encode(text, add_special_tokens=False).ids
    assert made.tokens(seen, ended=False, most=99) == [SPECIAL.index(end), *between]


def test_an_opened_thinking_is_opened_again_in_each_turn():
    made, encode = bridge(prefill="<think>\n"), tokenizer()
    text = encode.decode(
        made.tokens([{"role": "user", "content": "x"}], ended=True, most=9),
        skip_special_tokens=False,
    )
    assert text == "\n<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n<think>\n"


@pytest.mark.parametrize("name", REFUSED)
def test_a_template_that_cannot_hold_turns_is_refused_by_name(name):
    template, words = REFUSED[name]
    with pytest.raises(UserError, match=words) as error:
        bridge(template).pieces(("tool",))
    assert error.value.place == "here"


def test_without_a_template_there_is_no_bridge():
    codec = PromptCodec(
        TokenizerFiles(tokenizer(), {"eos_token": "<eos>"}, "here"),
        Data.model_validate({"sources": [{"name": "s", "kind": "jsonl", "uri": "x"}]}),
    )
    with pytest.raises(UserError, match="no chat template"):
        codec.bridge(Calculator.tools)
