"""Rollouts of a pool, honest and not, as the policy that judges them sees them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.unseeded.models import END, LONGEST, PROMPT, VOCAB, Model
from verify.truncation import Choices, Truncation, describe, thresholds

TEMPERATURE = 0.8
BATCH = 256
Choose = Callable[[np.ndarray], np.ndarray]
"""From log-probs [B, V] at the pool's temperature to those sampled from, -inf for never."""


def sample(model: Model, prompts: np.ndarray, rng: np.random.Generator, choose: Choose) -> Any:
    """i32 [B, LONGEST] outputs, and their lengths [B]."""
    state = np.zeros((len(prompts), model.mix.shape[0]), np.float32)
    for column in prompts.T:
        state = model.step(state, column)
    outputs = np.full((len(prompts), LONGEST), END, np.int32)
    lengths = np.full(len(prompts), LONGEST)
    for place in range(LONGEST):
        seen = choose(log_softmax(model.logits(state) / TEMPERATURE))
        tokens = np.argmax(seen + rng.gumbel(size=seen.shape), -1)
        outputs[:, place] = tokens
        lengths = np.where((tokens == END) & (lengths == LONGEST), place + 1, lengths)
        state = model.step(state, tokens)
    return outputs, lengths


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


@dataclass(frozen=True)
class Row:
    """What the validator finds of one rollout."""

    tokens: np.ndarray
    choices: Choices
    ended: bool


def prefill(
    model: Model,
    prompts: np.ndarray,
    outputs: np.ndarray,
    lengths: np.ndarray,
    rule: Truncation | None,
) -> list[Row]:
    """Rows of the policy in float32."""
    state = np.zeros((len(prompts), model.mix.shape[0]), np.float32)
    for column in prompts.T:
        state = model.step(state, column)
    places = []
    ids = np.arange(VOCAB)[None]
    for column in outputs.T:
        scaled = (model.logits(state) / TEMPERATURE).astype(np.float32)
        places.append(describe(np, scaled, ids == column[:, None], ids == END, rule))
        state = model.step(state, column)
    whole = Choices(*(np.stack(arrays, 1) for arrays in zip(*places, strict=True)))
    return [
        Row(outputs[b, :n], Choices(*(a[b, :n] for a in whole)), bool(outputs[b, n - 1] == END))
        for b, n in enumerate(lengths)
    ]


class Site:
    """The models, and who samples from them.

    Args:
        policy, smaller: the validator's, and an attacker's.
        text: lines that begin with the prompts.
        rule: what the pool cuts, as the validator sees it.
    """

    def __init__(
        self, policy: Model, smaller: Model, text: np.ndarray, rule: Truncation | None = None
    ) -> None:
        self.policy, self.smaller, self._text, self._rule = policy, smaller, text, rule

    def cutting(self, rule: Truncation) -> Site:
        """The same with another pool."""
        return Site(self.policy, self.smaller, self._text, rule)

    def rollouts(
        self, count: int, seed: int, choose: Choose = lambda p: p, *, model: Model | None = None
    ) -> list[Row]:
        """Rollouts of a way to choose, as the policy sees them."""
        return self._rows(
            count, seed, choose, model or self.policy, lambda prompt, out, n: (out, n)
        )

    def best_of(self, n: int, count: int, seed: int) -> list[Row]:
        """Of n samples of each prompt the one with the largest mean log-prob."""
        tries = [self._rows(count, seed, lambda p: p, self.policy, None, k) for k in range(n)]
        return [
            max(same, key=lambda row: float(row.choices.logprobs.mean()))
            for same in zip(*tries, strict=True)
        ]

    def truncated(self, share: float, keep: float, count: int, seed: int) -> list[Row]:
        """A share of the rollouts ends after a part of its length."""

        def cut(prompts: np.ndarray, outputs: np.ndarray, lengths: np.ndarray) -> Any:
            chosen = np.random.default_rng(seed).uniform(size=len(lengths)) < share
            shorter = np.maximum(1, (keep * lengths).astype(int))
            lengths = np.where(chosen, shorter, lengths)
            ended = outputs.copy()
            rows = np.flatnonzero(chosen)
            ended[rows, lengths[rows] - 1] = END
            return ended, lengths

        return self._rows(count, seed, lambda p: p, self.policy, cut)

    def _rows(
        self, count: int, seed: int, choose: Choose, model: Model, change: Any, attempt: int = 0
    ) -> list[Row]:
        rows: list[Row] = []
        for begin in range(0, count, BATCH):
            size = min(BATCH, count - begin)
            which = np.random.default_rng([seed, begin]).integers(0, len(self._text), size)
            prompts = self._text[which, :PROMPT]
            rng = np.random.default_rng([seed, begin, attempt])
            outputs, lengths = sample(model, prompts, rng, choose)
            if change is not None:
                outputs, lengths = change(prompts, outputs, lengths)
            rows += prefill(self.policy, prompts, outputs, lengths, self._rule)
        return rows


def never_ends(logprobs: np.ndarray) -> np.ndarray:
    """The end token is never taken."""
    return np.where(np.arange(VOCAB) == END, -np.inf, logprobs)


def top_k(k: int) -> Choose:
    return lambda p: np.where(p >= np.sort(p, -1)[:, -k][:, None], p, -np.inf)


def top_p(p: float) -> Choose:
    rule = Truncation(p)
    return lambda seen: np.where(seen >= thresholds(np, seen, rule).kept, seen, -np.inf)


def attacks(site: Site, count: int) -> dict[str, list[Row]]:
    """Rollouts of each attack."""
    return {
        "greedy": site.rollouts(count, 1, lambda p: 1e4 * p),
        "temperature x 0.5": site.rollouts(count, 2, lambda p: 2.0 * p),
        "temperature x 0.8": site.rollouts(count, 3, lambda p: p / 0.8),
        "temperature x 0.9": site.rollouts(count, 4, lambda p: p / 0.9),
        "temperature x 1.1": site.rollouts(count, 5, lambda p: p / 1.1),
        "temperature x 1.25": site.rollouts(count, 6, lambda p: p / 1.25),
        "temperature x 2": site.rollouts(count, 7, lambda p: p / 2.0),
        "top-k of 5": site.rollouts(count, 8, top_k(5)),
        "top-k of 10": site.rollouts(count, 9, top_k(10)),
        "best of 4 by log-prob": site.best_of(4, count, 10),
        "best of 16 by log-prob": site.best_of(16, count, 11),
        "smaller model": site.rollouts(count, 12, model=site.smaller),
        "smaller model, cooler": site.rollouts(count, 13, lambda p: p / 0.7, model=site.smaller),
        "all cut to a half": site.truncated(1.0, 0.5, count, 14),
        "a quarter cut to a half": site.truncated(0.25, 0.5, count, 15),
        "padded: no end before the longest": site.rollouts(count, 16, never_ends),
    }
