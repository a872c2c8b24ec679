"""Problems of an evaluation that a run's training problems contain: contamination, by problem."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

WORDS = 13
"""Length of the word sequences that two problems may not share (Brown et al. 2020, GPT-3)."""
_WORD = re.compile(r"\w+")


@dataclass(frozen=True)
class Overlap:
    """One problem of an evaluation that the training problems have, whole or in part."""

    problem_id: str
    exact: bool
    """Whether some training problem has the same words; else it shares `WORDS` in a row."""
    trained: str
    """Id of the first such problem."""


def overlaps(asked: Iterable[tuple[str, str]], trained: Iterable[tuple[str, str]]) -> list[Overlap]:
    """Return the problems of an evaluation that training problems contain.

    Case and punctuation do not count. A problem shorter than `WORDS` is compared whole.

    Args:
        asked: id and text of the evaluation's problems.
        trained: the same of the training problems, read once.
    """
    whole: dict[tuple[str, ...], list[str]] = {}
    parts: dict[tuple[str, ...], list[str]] = {}
    order = []
    for problem_id, text in asked:
        order.append(problem_id)
        words = _words(text)
        whole.setdefault(words, []).append(problem_id)
        for part in _parts(words):
            parts.setdefault(part, []).append(problem_id)
    found: dict[str, Overlap] = {}
    for trained_id, text in trained:
        words = _words(text)
        for problem_id in whole.get(words, ()):
            if problem_id not in found or not found[problem_id].exact:
                found[problem_id] = Overlap(problem_id, True, trained_id)
        for part in _parts(words):
            for problem_id in parts.get(part, ()):
                found.setdefault(problem_id, Overlap(problem_id, False, trained_id))
    return [found[problem_id] for problem_id in order if problem_id in found]


def _words(text: str) -> tuple[str, ...]:
    return tuple(_WORD.findall(text.lower()))


def _parts(words: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    for start in range(len(words) - WORDS + 1):
        yield words[start : start + WORDS]
