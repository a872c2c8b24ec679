"""A small tokenizer for a model that the run makes itself, as real Hugging Face files.

Words that every prompt has are one token each, everything else is single characters: the policy
sees a word that it must spell letter by letter. All text is lower-cased (the scorers that matter
here ignore case), which spares the small model a second alphabet.
"""

from __future__ import annotations

import re
import string
from collections.abc import Sequence
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import WordLevel

from runspec.core.errors import UserError
from sampler.tasks.prompts import THINK_END

PAD, EOS, UNKNOWN, THINK = "<pad>", "<eos>", "<unk>", "<think>"
SPECIAL = (PAD, EOS, UNKNOWN, THINK, THINK_END)
CHARACTERS = string.ascii_lowercase + string.digits + string.punctuation + " \n"
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '\\n<think>' }}{% endif %}"
)
_WORD = re.compile(r" ?(?:[a-z]+|[0-9]+)")
# The last word of a line is never one token: there stands what the problem is about, spelt even
# where it happens to be a word of the boilerplate.
_WORD_ENDS = r"(?![a-z0-9]|\s*(?:\n|$))"
_WORD_BEGINS = r"(?<![a-z0-9])"


def boilerplate(texts: Sequence[str]) -> list[str]:
    """The words and numbers that all texts have, each with the blank before it where it has one.

    Args:
        texts: prompts of different problems.
    """
    common = set.intersection(*(set(_WORD.findall(text.lower())) for text in texts))
    return sorted(common)


def build_tokenizer(
    words: Sequence[str], vocab_size: int, characters: Sequence[str] = ()
) -> Tokenizer:
    """A tokenizer whose vocabulary is special tokens, characters, words and padding.

    Args:
        words: whole-word tokens, lower-case, a leading blank included where there is one.
        vocab_size: of the model; unused ids are named <unused0>, <unused1>, ...
        characters: lower-case ones beside those of `CHARACTERS`.

    Raises:
        UserError: the model's vocabulary is too small.
    """
    tokens = list(dict.fromkeys([*SPECIAL, *CHARACTERS, *characters, *words]))
    if len(tokens) > vocab_size:
        raise UserError(
            f"{len(tokens)} tokens do not fit a vocabulary of {vocab_size}",
            place="model.shape.vocab_size",
            remedy=f"make it at least {len(tokens)}",
        )
    tokens += [f"<unused{i}>" for i in range(vocab_size - len(tokens))]
    tokenizer = Tokenizer(
        WordLevel({token: i for i, token in enumerate(tokens)}, unk_token=UNKNOWN)
    )
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(_pieces(words)), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    return tokenizer


def tokenizer_config() -> dict[str, Any]:
    """tokenizer_config.json, as transformers and vLLM read it."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": EOS,
        "pad_token": PAD,
        "unk_token": UNKNOWN,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }


def _pieces(words: Sequence[str]) -> str:
    """An Oniguruma pattern that cuts text into words of the vocabulary and single characters."""
    longest_first = sorted(words, key=lambda word: (-len(word), word))
    whole = [
        ("" if word.startswith(" ") else _WORD_BEGINS) + re.escape(word) + _WORD_ENDS
        for word in longest_first
    ]
    return "(?m)" + "|".join([*whole, "."])  # (?m): the dot matches a line break too
