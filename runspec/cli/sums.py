"""Data of `runspec init --template sums`: two-digit sums with worked carries."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from typing import Any

SUPERVISED, PROBLEMS, HELD_OUT = 500, 3500, 500
"""Sums of each file; no sum is in two of them."""
CHAT_TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'assistant' %}"
    "{% generation %}{{ message.content }}<|eos|>{% endgeneration %}"
    "{% else %}<|bos|>{{ message.content }}{% endif %}{% endfor %}"
)
"""Marks what the assistant says, which is what `sft` trains."""


def sums(seed: int) -> list[tuple[int, int]]:
    """Return the summands of all files, in the files' order."""
    pairs = [(a, b) for a in range(100) for b in range(100)]
    random.Random(seed).shuffle(pairs)
    return pairs[: SUPERVISED + PROBLEMS + HELD_OUT]


def worked(a: int, b: int) -> str:
    """Return ones, tens with the carry, and the answer.

    37 + 48 is `7+8=15;3+4+1=8</think>85`.
    """
    ones = a % 10 + b % 10
    tens = a // 10 + b // 10 + ones // 10
    carried = f"{a % 10}+{b % 10}={ones:02};{a // 10}+{b // 10}+{ones // 10}={tens}"
    return f"{carried}</think>{a + b}"


def data_files(seed: int) -> dict[str, str]:
    """Return the files of conversations and of problems by their names; a sum is in one of them."""
    drawn, end = sums(seed), SUPERVISED + PROBLEMS
    return {
        "sft.jsonl": _lines(_conversation(a, b) for a, b in drawn[:SUPERVISED]),
        "problems.jsonl": _lines(_problem(a, b) for a, b in drawn[SUPERVISED:end]),
        "held_out.jsonl": _lines(_problem(a, b) for a, b in drawn[end:]),
    }


def tokenizer_files() -> dict[str, str]:
    """Return what goes with digits.json, a tokenizer that is trained on all `worked` sums."""
    tokens = {f"{kind}_token": f"<|{kind}|>" for kind in ("pad", "bos", "eos")}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    return {
        "tokenizer/tokenizer_config.json": json.dumps({**config, **tokens}, indent=1) + "\n",
        "tokenizer/chat_template.jinja": CHAT_TEMPLATE,
    }


def _problem(a: int, b: int) -> dict[str, Any]:
    return {
        "problem_id": f"{a}+{b}",
        "task_type": "math",
        "prompt": f"{a}+{b}=",
        "verification_info": {"ground_truth": str(a + b)},
    }


def _conversation(a: int, b: int) -> dict[str, Any]:
    return {
        "messages": [
            {"role": "user", "content": f"{a}+{b}="},
            {"role": "assistant", "content": worked(a, b)},
        ]
    }


def _lines(rows: Iterable[dict[str, Any]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)
