"""Recurrent models of characters, which learn this repository's documentation."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

VOCAB, END, PROMPT, LONGEST = 128, 0, 8, 160
ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Model:
    """h_t = tanh(E[x_t] + h_{t-1} A), logits = (h_t / rms(h_t)) W."""

    embed: np.ndarray
    mix: np.ndarray
    head: np.ndarray
    dtype: Any = np.float32
    """What activations are rounded to."""

    def step(self, state: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        return self._round(np.tanh(self.embed[tokens] + state @ self.mix))

    def logits(self, state: np.ndarray) -> np.ndarray:
        hidden = self._round(state / np.sqrt(np.mean(state**2, -1, keepdims=True) + 1e-6))
        return self._round(hidden @ self.head)

    def _round(self, values: np.ndarray) -> np.ndarray:
        return values.astype(self.dtype).astype(np.float32)


def lines() -> np.ndarray:
    """i32 [lines, LONGEST + 1]: characters of the documentation, then the end token."""
    rows = []
    for path in sorted([*ROOT.glob("docs/*.md"), ROOT / "README.md"]):
        for line in path.read_text().splitlines():
            text = [ord(c) for c in line.strip() if 31 < ord(c) < VOCAB][:LONGEST]
            if len(text) >= 3 * PROMPT:
                rows.append(text + [END] * (LONGEST + 1 - len(text)))
    return np.array(rows, np.int32)


def trained(hidden: int, text: np.ndarray, steps: int) -> Model:
    """A model of the lines, by Adam on the cross-entropy up to the end token."""
    keys = jax.random.split(jax.random.key(hidden), 3)
    shapes = ((VOCAB, hidden), (hidden, hidden), (hidden, VOCAB))
    scales = (0.5, 0.9 / hidden**0.5, 1.0 / hidden**0.5)
    params = [s * jax.random.normal(k, n) for k, n, s in zip(keys, shapes, scales, strict=True)]
    optimizer = optax.adam(optax.cosine_decay_schedule(3e-3, steps))

    def loss(params: list[jax.Array], tokens: jax.Array) -> jax.Array:
        embed, mix, head = params

        def one(state: jax.Array, token: jax.Array) -> tuple[jax.Array, jax.Array]:
            state = jnp.tanh(embed[token] + state @ mix)
            return state, state

        start = jnp.zeros((tokens.shape[0], hidden))
        _, states = jax.lax.scan(one, start, tokens[:, :-1].T)
        normed = states * jax.lax.rsqrt(jnp.mean(states**2, -1, keepdims=True) + 1e-6)
        logprobs = jax.nn.log_softmax(normed @ head)
        targets = tokens[:, 1:].T
        mine = jnp.take_along_axis(logprobs, targets[..., None], -1)[..., 0]
        before = tokens[:, :-1].T != END  # the end token itself is the last that counts
        return -(mine * before).sum() / before.sum()

    @jax.jit
    def update(params: Any, state: Any, tokens: jax.Array) -> tuple[Any, Any, jax.Array]:
        value, gradient = jax.value_and_grad(loss)(params, tokens)
        change, state = optimizer.update(gradient, state)
        return optax.apply_updates(params, change), state, value

    state, rng = optimizer.init(params), np.random.default_rng(0)
    value = jnp.zeros(())
    for _ in range(steps):
        params, state, value = update(params, state, text[rng.integers(0, len(text), 32)])
    print(f"hidden {hidden}: loss {float(value):.3f} nats a character", file=sys.stderr)
    embed, mix, head = (np.asarray(p) for p in params)
    return Model(embed, mix, head)
