"""Policies that a worker may serve in place of the leased version, each near it in its own way."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np

from tests.verify.small_model import EOS, VOCAB, SmallModel, log_softmax

TEMPERATURE, LONGEST = 0.8, 24


def trained(model: SmallModel, updates: int, *, rate: float = 0.1, seed: int = 0) -> SmallModel:
    """The policy after some updates of its output head by REINFORCE: even tokens are rewarded.

    Each update samples 64 outputs and follows sum_t A (1[o_t] - p_t) h_t, A the reward minus the
    mean of all.
    """
    rng = np.random.default_rng(seed)
    for _ in range(updates):
        hidden, tokens, scores = _sampled(model, 64, rng)
        alive = np.cumsum(tokens == EOS, axis=1) - (tokens == EOS) == 0
        reward = ((tokens % 2 == 0) & alive).sum(1) / alive.sum(1)
        weight = (reward - reward.mean())[:, None] * alive
        model = _moved(model, hidden, tokens, scores, weight, rate)
    return model


def fine_tuned(model: SmallModel, steps: int, *, rate: float = 0.1) -> SmallModel:
    """The policy after some steps of cross-entropy of its head on a text: 1, 2, 3, ... again."""
    text = 1 + np.arange(8)[:, None] * 5 + np.arange(LONGEST)[None]
    tokens = 1 + text % (VOCAB - 1)
    for _ in range(steps):
        hidden, scores = _read(model, tokens)
        model = _moved(model, hidden, tokens, scores, np.ones(tokens.shape), rate)
    return model


def rounded(model: SmallModel, bits: int) -> SmallModel:
    """Weights rounded to integers of so many bits, a scale for each column."""
    largest = 2 ** (bits - 1) - 1

    def quantised(weights: np.ndarray) -> np.ndarray:
        scale = np.abs(weights).max(axis=0, keepdims=True) / largest
        return (np.round(weights / scale) * scale).astype(np.float32)

    return _each(model, quantised)


def rounded_to_fp8(model: SmallModel) -> SmallModel:
    """Weights rounded to float8 (e4m3), a scale for each column."""

    def quantised(weights: np.ndarray) -> np.ndarray:
        scale = np.abs(weights).max(axis=0, keepdims=True) / 448.0
        eighth = (weights / scale).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
        return (eighth * scale).astype(np.float32)

    return _each(model, quantised)


class Fp8Cache(SmallModel):
    """Keeps in float8 (e4m3) what it remembers of the past: here the state, in a transformer the
    keys and values."""

    def step(self, state: np.ndarray, token: int) -> np.ndarray:
        kept = state.astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
        return super().step(kept, token)


def with_fp8_cache(model: SmallModel) -> SmallModel:
    return Fp8Cache(model.embed, model.mix, model.head, model.dtype)


def smaller(model: SmallModel, units: int) -> SmallModel:
    """A model of so many hidden units: the others are always zero."""
    lives = np.arange(model.mix.shape[0]) < units
    return replace(
        model,
        embed=model.embed * lives,
        mix=model.mix * lives * lives[:, None],
        head=model.head * lives[:, None],
    )


def _each(model: SmallModel, change) -> SmallModel:
    embed, mix, head = (change(weights) for weights in (model.embed, model.mix, model.head))
    return replace(model, embed=embed, mix=mix, head=head)


def _sampled(model, count, rng):
    """Hidden states [B, n, D], tokens [B, n] and log-probs [B, n, V] of outputs to nothing."""
    tokens = np.zeros((count, LONGEST), np.int64)
    state = np.zeros((count, model.mix.shape[0]), np.float32)
    hidden, scores = [], []
    previous = rng.integers(1, VOCAB, count)
    for place in range(LONGEST):
        state, normed, logprobs = _next(model, state, previous)
        tokens[:, place] = previous = np.argmax(logprobs + rng.gumbel(size=logprobs.shape), -1)
        hidden.append(normed)
        scores.append(logprobs)
    return np.stack(hidden, 1), tokens, np.stack(scores, 1)


def _read(model, tokens):
    state = np.zeros((len(tokens), model.mix.shape[0]), np.float32)
    hidden, scores = [], []
    for column in np.concatenate([np.ones((len(tokens), 1), np.int64), tokens[:, :-1]], 1).T:
        state, normed, logprobs = _next(model, state, column)
        hidden.append(normed)
        scores.append(logprobs)
    return np.stack(hidden, 1), np.stack(scores, 1)


def _next(model, state, tokens):
    state = np.tanh(model.embed[tokens] + state @ model.mix)
    normed = state / np.sqrt(np.mean(state**2, axis=1, keepdims=True))
    return state, normed, log_softmax(normed @ model.head / TEMPERATURE)


def _moved(model, hidden, tokens, scores, weight, rate):
    chosen = np.eye(VOCAB)[tokens]
    gradient = np.einsum("bn,bnd,bnv->dv", weight, hidden, chosen - np.exp(scores))
    return replace(model, head=(model.head + rate * gradient / weight.shape[0]).astype(np.float32))
