"""The policy and the loss a second time: one sample at a time, from the formulas of the docs.

No formula here is packed, scanned, chunked, blocked or sharded, and none comes from `learner_jax`.
Run under `jax.enable_x64(True)` it is the truth that the learner is measured against. `inputs_of`
lays the same rollouts out for the learner's loss.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from learner_jax.loss import token_weights
from learner_jax.packing import LossInputs, Packed
from runspec.core.models import ModelConfig
from runspec.core.schema import Clip, Grpo

MAX_NEW_TOKENS = 16
"""Of `tiny_spec`'s pool."""


@dataclass(frozen=True)
class Rollout:
    """A sample and all that the loss knows of it."""

    prompt: np.ndarray
    output: np.ndarray
    advantage: float
    old: np.ndarray
    mu: np.ndarray
    ref: np.ndarray


def make_rollouts(rng: np.random.Generator, vocab: int, count: int, longest: int) -> list[Rollout]:
    """Random rollouts, advantages of both signs, stale log-probs that reach every clip.

    Of two different shapes, so that the reference is compiled twice only.
    """
    rollouts = []
    shapes = rng.integers(1, longest // 2, (2, 2))
    for number in range(count):
        prompt, output = shapes[number % 2]
        near = -math.log(vocab) + rng.normal(size=(3, output))
        rollouts.append(
            Rollout(
                prompt=rng.integers(0, vocab, prompt).astype(np.int32),
                output=rng.integers(0, vocab, output).astype(np.int32),
                advantage=float(rng.normal()),
                old=near[0],
                mu=near[1],
                ref=near[2],
            )
        )
    return rollouts


def inputs_of(packed: Packed, rollouts: list[Rollout], algorithm: Grpo) -> LossInputs:
    """The loss inputs of all microbatches, float64."""
    lengths = [len(rollout.output) for rollout in rollouts]
    weights = token_weights(lengths, algorithm.loss_normalizer, max_new_tokens=MAX_NEW_TOKENS)
    return LossInputs(
        weights=packed.scatter([np.full(n, w) for n, w in zip(lengths, weights, strict=True)]),
        advantages=packed.scatter([np.full(len(r.output), r.advantage) for r in rollouts]),
        old_logprobs=packed.scatter([r.old for r in rollouts]),
        sampler_logprobs=packed.scatter([r.mu for r in rollouts]),
        ref_logprobs=packed.scatter([r.ref for r in rollouts]),
    )


def logits_of(params: Any, config: ModelConfig, tokens: jax.Array) -> jax.Array:
    """[n] -> [n, V], Qwen2 as its paper and config.json describe it."""
    n, heads, h = len(tokens), config.num_attention_heads, config.head_dim
    group = heads // config.num_key_value_heads

    def norm(x: jax.Array, weight: jax.Array) -> jax.Array:
        return x / jnp.sqrt((x**2).mean(-1, keepdims=True) + config.rms_norm_eps) * weight

    def rope(x: jax.Array) -> jax.Array:  # complex numbers: a turn is a product
        theta = config.rope_theta ** (-np.arange(0, h, 2) / h)
        turn = np.exp(1j * np.arange(n)[:, None] * theta)
        turned = (x[:, : h // 2] + 1j * x[:, h // 2 :]) * turn
        return jnp.concatenate([turned.real, turned.imag], axis=-1)

    x = params["embed"][tokens]
    for i in range(config.num_hidden_layers):
        layer = jax.tree.map(lambda leaf, i=i: leaf[i], params["layers"])
        attention, mlp = layer["attention"], layer["mlp"]
        y = norm(x, layer["attn_norm"]["weight"])
        for head in range(heads):
            kv = head // group
            q, k, v = (
                y @ attention[name]["weight"][:, number] + attention[name]["bias"][number]
                for name, number in (("q", head), ("k", kv), ("v", kv))
            )
            q, k = rope(q), rope(k)
            scores = jnp.where(np.tri(n, dtype=bool), q @ k.T / math.sqrt(h), -jnp.inf)
            x = x + jax.nn.softmax(scores, axis=-1) @ v @ attention["o"]["weight"][head]
        y = norm(x, layer["mlp_norm"]["weight"])
        gate, up, down = (mlp[name]["weight"] for name in ("gate", "up", "down"))
        x = x + (jax.nn.silu(y @ gate) * (y @ up)) @ down
    head_matrix = params["embed"].T if config.tie_word_embeddings else params["head"]
    return norm(x, params["final_norm"]["weight"]) @ head_matrix


@partial(jax.jit, static_argnames=("config", "temperature"))
def log_table(
    params: Any, config: ModelConfig, prompt: jax.Array, output: jax.Array, temperature: float
) -> jax.Array:
    """[n, V]: log_softmax(logits / T) at the positions that predict the n output tokens."""
    logits = logits_of(params, config, jnp.concatenate([prompt, output]))
    table = jax.nn.log_softmax(logits / temperature)
    return table[len(prompt) - 1 : len(prompt) - 1 + len(output)]


def loss_of(
    params: Any,
    config: ModelConfig,
    rollouts: list[Rollout],
    algorithm: Grpo,
    *,
    temperature: float,
    max_new_tokens: int,
) -> jax.Array:
    """The loss of one whole optimizer batch."""
    logprobs, entropies = [], []
    for rollout in rollouts:
        table = log_table(params, config, rollout.prompt, rollout.output, temperature)
        logprobs.append(table[np.arange(len(rollout.output)), rollout.output])
        entropies.append(-(jnp.exp(table) * table).sum(-1))
    return loss_of_logprobs(logprobs, entropies, rollouts, algorithm, max_new_tokens=max_new_tokens)


def loss_of_logprobs(
    logprobs: list[jax.Array],
    entropies: list[jax.Array],
    rollouts: list[Rollout],
    algorithm: Grpo,
    *,
    max_new_tokens: int,
) -> jax.Array:
    """The loss of one whole optimizer batch, from each sample's log pi_theta and entropies [n]."""
    lengths = [len(rollout.output) for rollout in rollouts]
    normaliser: dict[str, Callable[[int], float]] = {
        "sequence": lambda n: len(lengths) * n,
        "token": lambda n: sum(lengths),
        "constant": lambda n: len(lengths) * max_new_tokens,
    }
    total = jnp.zeros(())
    for rollout, current, entropy, n in zip(rollouts, logprobs, entropies, lengths, strict=True):
        gain = surrogate_of(rollout, current, algorithm)
        if algorithm.importance.cap is not None:
            gain = gain * np.minimum(np.exp(rollout.old - rollout.mu), algorithm.importance.cap)
        kl = jnp.exp(rollout.ref - current) - (rollout.ref - current) - 1
        per_token = -gain + algorithm.kl.coef * kl - algorithm.entropy_coef * entropy
        total = total + per_token.sum() / normaliser[algorithm.loss_normalizer](n)
    return total


def surrogate_of(rollout: Rollout, current: jax.Array, algorithm: Grpo) -> jax.Array:
    """[n]: what each token of one sample gains, by the switches `ratio` and `surrogate`."""
    clip, a = algorithm.clip, rollout.advantage
    if algorithm.ratio == "token":
        ratio = jnp.exp(jnp.clip(current - rollout.old, -20, 20))
    else:  # GSPO, equation 7: (pi_theta(y) / pi_old(y)) ^ (1 / |y|)
        whole = jnp.exp(current.sum()) / np.exp(rollout.old.sum())
        ratio = jnp.broadcast_to(whole ** (1 / len(current)), current.shape)
    if algorithm.surrogate == "cispo":  # MiniMax-M1, equations 4 and 5
        weight = jnp.clip(ratio, 1 - clip.eps_low, 1 + clip.eps_high)
        return jax.lax.stop_gradient(weight) * a * current
    return clipped_gain(ratio, a, clip)


def clipped_gain(ratio: jax.Array, a: float, clip: Clip) -> jax.Array:
    """The clipped surrogate of PPO, GRPO and DAPO, with delta that of INTELLECT-2."""
    clipped = jnp.clip(ratio, 1 - clip.eps_low, 1 + clip.eps_high)
    if clip.delta is None:
        return jnp.minimum(ratio * a, clipped * a)
    return jnp.minimum(jnp.minimum(ratio, clip.delta) * a, clipped * a)


def relative_errors(found: Any, expected: Any) -> dict[str, float]:
    """||a - b|| / ||b|| of each tensor, by its path."""

    def error(a: Any, b: Any) -> float:
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        return float(np.linalg.norm(a - b) / max(np.linalg.norm(b), 1e-30))

    errors = jax.tree_util.tree_map_with_path(
        lambda path, a, b: (jax.tree_util.keystr(path), error(a, b)), found, expected
    )
    return dict(jax.tree.leaves(errors, is_leaf=lambda leaf: isinstance(leaf, tuple)))
