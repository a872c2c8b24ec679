"""A sampler in JAX: decodes with a cache of keys and values, in an engine's own shapes.

It shares no code with the validator's prefill but RoPE and the noise. Honest with `Choice()`;
attackers choose otherwise. Logits are float32 in bfloat16 too, as our engine has them of vLLM.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.attacks.policies import END, Weights
from learner_jax.decoder import rotate, rotation
from runspec.core.models import ModelConfig
from verify.noise import gumbel
from verify.truncation import kept_from

LONGEST = 128
"""Output tokens, at most."""
TEMPERATURE = 0.8


class Choice(NamedTuple):
    """How tokens are chosen from logits at the pool's temperature."""

    temperature: float = 1.0
    """Factor on the pool's."""
    noise: float = 1.0
    """Factor on the noise; 0 is greedy."""
    top_k: int = 1 << 30
    """As many as there are, or more: none is cut off."""
    top_p: float = 1.0
    never_ends: bool = False


@dataclass(frozen=True)
class Sampled:
    """Outputs, and what their sampler computed of them."""

    tokens: np.ndarray
    """i32 [M, 128]; after the end token they mean nothing."""
    lengths: np.ndarray
    """i64 [M], the end token included."""
    logprobs: np.ndarray
    """f32 [M, 128]: by the sampler's weights, of the pool's distribution."""
    chosen: np.ndarray
    """f32 [M, 128]: of the distribution that was sampled from."""
    hidden: np.ndarray
    """u16 [M, 128, D]: bits of bfloat16."""

    def with_tokens(self, tokens: np.ndarray, lengths: np.ndarray) -> Sampled:
        """The same claims of other tokens."""
        return Sampled(tokens, lengths, self.logprobs, self.chosen, self.hidden)

    def taken(self, rows: np.ndarray, *others: Sampled) -> Sampled:
        """Of several samplings, row by row the one that `rows` [M] names: 0 for this one."""
        m = np.arange(len(rows))
        stacks = zip(*(vars(each).values() for each in (self, *others)), strict=True)
        return Sampled(*(np.stack(arrays)[rows, m] for arrays in stacks))


def sample(
    weights: Weights,
    prompts: np.ndarray,
    keys: np.ndarray,
    choice: Choice = Choice(),  # noqa: B008
    *,
    dtype: str,
    rows: int,
) -> Sampled:
    """Samples i32 [M, 32] prompts under i32 [M, 2] noise keys, `rows` at a time.

    Args:
        weights: the model.
        prompts, keys: of the rollouts.
        choice: how tokens are chosen.
        dtype: float32 or bfloat16.
        rows: of a batch; the last is filled up.
    """
    params = jax.tree.map(lambda leaf: leaf.astype(dtype), weights.params)
    found = []
    for start in range(0, len(prompts), rows):
        here = np.arange(start, start + rows) % len(prompts)
        outputs = _decode(
            params,
            jnp.asarray(prompts[here]),
            jnp.asarray(keys[here]),
            choice,
            weights.fp8_cache,
            config=weights.config,
        )
        found.append([np.moveaxis(np.asarray(each), 0, 1) for each in outputs])
    tokens, logprobs, chosen, hidden = (
        np.concatenate(parts)[: len(prompts)] for parts in zip(*found, strict=True)
    )
    return Sampled(tokens, lengths_of(tokens), logprobs, chosen, hidden)


def lengths_of(tokens: np.ndarray) -> np.ndarray:
    """i64 [M]: up to the first end token, it included."""
    ends = tokens == END
    return np.where(ends.any(1), ends.argmax(1) + 1, tokens.shape[1])


@partial(jax.jit, static_argnames="config")
def _decode(
    params: Any,
    prompts: jax.Array,
    keys: jax.Array,
    choice: Choice,
    fp8_cache: jax.Array,
    *,
    config: ModelConfig,
) -> Any:
    """Tokens, log-probs, those sampled from, hidden states: [128, B] each."""
    batch, length = prompts.shape
    dtype = params["embed"].dtype
    shape = (batch, length + LONGEST, config.num_key_value_heads, config.head_dim)
    layers = range(config.num_hidden_layers)
    caches = [(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)) for _ in layers]
    vocabulary = jnp.arange(config.vocab_size, dtype=jnp.int32)[None]
    head = params["embed"].T if config.tie_word_embeddings else params["head"]
    head = head.astype(jnp.float32)

    def take(x: jax.Array, place: jax.Array) -> tuple:
        """The token after hidden states [B, D]."""
        logits = (x.astype(jnp.float32) @ head) / TEMPERATURE
        noise = gumbel(jnp, keys[:, :1], keys[:, 1:], place, vocabulary)
        token, chosen = _chosen(logits, noise, vocabulary, choice)
        logprobs = jax.nn.log_softmax(logits)
        mine = jnp.take_along_axis(logprobs, token[:, None], 1)[:, 0]
        return token, mine, chosen, jax.lax.bitcast_convert_type(x.astype(jnp.bfloat16), jnp.uint16)

    def one(carry: Any, place: jax.Array) -> Any:
        x, caches = carry
        out = take(x, place)
        x, caches = _block(params, config, out[0][:, None], caches, length + place, fp8_cache)
        return (x[:, -1], caches), out

    x, caches = _block(params, config, prompts, caches, jnp.int32(0), fp8_cache)
    _, outputs = jax.lax.scan(one, (x[:, -1], caches), jnp.arange(LONGEST, dtype=jnp.int32))
    return outputs


def _chosen(logits: Any, noise: Any, vocabulary: Any, choice: Choice) -> tuple[Any, Any]:
    """i32 [B] tokens, and their log-probs f32 [B] in the distribution sampled from."""
    seen = logits / choice.temperature
    seen = jnp.where(choice.never_ends & (vocabulary == END), -jnp.inf, seen)
    cuts = (choice.top_k < seen.shape[1]) | (choice.top_p < 1.0)
    least = jax.lax.cond(
        cuts,
        lambda z: kept_from(jnp, z, top_p=choice.top_p, top_k=choice.top_k, repeat=_repeat),
        lambda z: jnp.full((len(z), 1), -jnp.inf),
        jnp.maximum(seen, -1e30),
    )
    seen = jnp.where(seen >= least, seen, -jnp.inf)
    token = jnp.argmax(seen + choice.noise * noise, -1).astype(jnp.int32)
    logprob = jnp.take_along_axis(jax.nn.log_softmax(seen), token[:, None], 1)[:, 0]
    return token, jnp.where(choice.noise > 0.0, logprob, 0.0)


def _repeat(count: int, step: Any, state: Any) -> Any:
    return jax.lax.fori_loop(0, count, lambda _, reached: step(reached), state)


def _block(
    params: Any, config: ModelConfig, tokens: Any, caches: Any, start: Any, fp8_cache: Any
) -> Any:
    """Final hidden states [B, n, D] of tokens [B, n] at `start`, and the caches with them."""
    n, size = tokens.shape[1], caches[0][0].shape[1]
    positions = start + jnp.arange(n, dtype=jnp.int32)
    turn = rotation(jnp.broadcast_to(positions, tokens.shape), config)
    visible = jnp.arange(size)[None] <= positions[:, None]  # [n, T]
    groups = config.num_attention_heads // config.num_key_value_heads
    x, after = params["embed"][tokens], []
    for number, (keys, values) in enumerate(caches):
        w = jax.tree.map(lambda leaf, number=number: leaf[number], params["layers"])
        y = _norm(x, w["attn_norm"]["weight"], config)
        attention, mlp = w["attention"], w["mlp"]
        q, k, v = (
            jnp.einsum("bnd,dhk->bnhk", y, part["weight"]) + part.get("bias", 0.0)
            for part in (attention["q"], attention["k"], attention["v"])
        )
        q, k = rotate(q, turn), rotate(k, turn)
        k, v = (jnp.where(fp8_cache, _e4m3(each), each) for each in (k, v))
        keys, values = (
            jax.lax.dynamic_update_slice_in_dim(cache, new, start, 1)
            for cache, new in ((keys, k), (values, v))
        )
        after.append((keys, values))
        q = q.reshape(*q.shape[:2], -1, groups, config.head_dim)
        scores = jnp.einsum("bnkgh,btkh->bkgnt", q, keys).astype(jnp.float32)
        scores = jnp.where(visible, scores * config.head_dim**-0.5, -jnp.inf)
        shares = jax.nn.softmax(scores).astype(x.dtype)
        mixed = jnp.einsum("bkgnt,btkh->bnkgh", shares, values)
        mixed = mixed.reshape(*mixed.shape[:2], -1, config.head_dim)
        x = x + jnp.einsum("bnhk,hkd->bnd", mixed, attention["o"]["weight"])
        y = _norm(x, w["mlp_norm"]["weight"], config)
        gate, up, down = (mlp[name]["weight"] for name in ("gate", "up", "down"))
        x = x + (jax.nn.silu(y @ gate) * (y @ up)) @ down
    return _norm(x, params["final_norm"]["weight"], config), after


def _norm(x: jax.Array, weight: jax.Array, config: ModelConfig) -> jax.Array:
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide**2, -1, keepdims=True) + config.rms_norm_eps)
    return weight * wide.astype(x.dtype)


def _e4m3(x: jax.Array) -> jax.Array:
    return jnp.clip(x, -448, 448).astype(jnp.float8_e4m3fn).astype(x.dtype)
