"""Search in a problem's own documents, and questions that a few words answer."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import log

from sampler.tasks.environments.tools import ToolCall, ToolEnvironment, schema
from verify.plugins import Problem

SHOWN = 3
"""Documents that a search shows, at most."""
_WORD = re.compile(r"\w+")
_PUNCTUATION, _ARTICLE = re.compile(r"[^\w\s]"), re.compile(r"\b(a|an|the)\b")


class Search(ToolEnvironment):
    """The tool `search` over `verification_info.documents`, a list of texts. An answer is right if
    it is `ground_truth`, or one of them, but for case, punctuation and articles (as for SQuAD).
    Examples ask `verification_info.query`."""

    tools = (schema("search", "Finds documents.", query="words to look for"),)
    max_turns, max_tokens_per_turn, max_observation_tokens = 6, 256, 512

    def use(self, problem: Problem, call: ToolCall) -> str:
        documents = tuple(problem.verification["documents"])
        found = ranked(documents, str(call.arguments.get("query", "")))[:SHOWN]
        return "\n".join(f"[{number + 1}] {documents[number]}" for number in found) or "nothing"

    def judge(self, problem: Problem, answer: str) -> float:
        truth = problem.verification["ground_truth"]
        truths = [truth] if isinstance(truth, str) else truth
        return float(_plain(answer) in map(_plain, truths))

    def example(self, problem: Problem) -> list[str] | None:
        query, truth = problem.verification.get("query"), problem.verification["ground_truth"]
        if query is None:
            return None
        return [f"search({query})", truth if isinstance(truth, str) else truth[0]]


def _plain(text: str) -> str:
    return " ".join(_ARTICLE.sub(" ", _PUNCTUATION.sub("", text.lower())).split())


@dataclass(frozen=True)
class Index:
    """How often each word is in each document."""

    counts: Sequence[Counter[str]]
    holding: Counter[str]
    """Documents that hold a word."""
    words: int
    """Of all documents."""


@lru_cache(64)
def index(documents: tuple[str, ...]) -> Index:
    counts = [Counter(_WORD.findall(text.lower())) for text in documents]
    holding = Counter(word for each in counts for word in each)
    return Index(counts, holding, sum(each.total() for each in counts))


def ranked(documents: tuple[str, ...], query: str) -> list[int]:
    """Return the documents that hold a word of the query, the best first: BM25 as in Lucene, with
    k1 = 1.5 and b = 0.75, words that occur twice in the query counted twice.

    The score of document d with n_w of word w among its |d| words is the sum over the query of

        log(1 + (N - N_w + 1/2) / (N_w + 1/2)) n_w / (n_w + 3/2 (1/4 + 3/4 |d| / mean |d|))

    It is computed in integers, from a logarithm that is rounded to 2^-20, and documents of equal
    scores keep their order. So every machine finds the same.
    """
    found, n = index(documents), len(documents)
    asked = [word for word in _WORD.findall(query.lower()) if word in found.holding]
    rare = {word: round(log((n + 1) / (found.holding[word] + 0.5)) * (1 << 20)) for word in asked}
    scores = []
    for counts in found.counts:
        longer = 3 * found.words + 9 * counts.total() * n
        often = {word: 8 * counts[word] * found.words for word in rare}
        scores.append(sum((rare[w] * often[w]) // (often[w] + longer) for w in asked))
    best = sorted(range(n), key=lambda number: -scores[number])
    return [number for number in best if scores[number] > 0]
