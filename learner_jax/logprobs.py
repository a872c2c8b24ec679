"""Log-probability of given tokens and entropy, without logits of the whole row."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from learner_jax.model import widen

LOGITS_PER_ROW = 2**26
"""Logits of one row alive at a time, at most: 256 MiB in float32."""


def chunk_tokens(vocab: int) -> int:
    """Positions of a row whose logits are computed at a time, a power of two."""
    return 1 << ((LOGITS_PER_ROW // vocab).bit_length() - 1)


def token_logprobs(
    hidden: Float[Array, "B T D"],
    head: Float[Array, "D V"],
    targets: Int[Array, "B T"],
    *,
    temperature: float,
    chunk: int | None = None,
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
    """log_softmax(logits / temperature) at `targets`, and the entropy of that distribution.

    Computed in chunks of the sequence, recomputed in the backward pass, so that [B, T, V] never
    exists, forward or backward.

    Args:
        hidden: after the last norm.
        head: cast to the type of `hidden` inside a chunk, so that its gradient is summed over the
            chunks in its own type: pass the float32 masters.
        targets: the token that follows each position.
        temperature: of sampling.
        chunk: positions at a time; by default as `chunk_tokens` says.

    Returns:
        log-probabilities and entropies in nats, [B, T], at least float32.
    """
    length = hidden.shape[1]
    chunk = min(chunk or chunk_tokens(head.shape[1]), length)

    @jax.checkpoint
    def one_chunk(part: tuple[Array, Array]) -> tuple[Array, Array]:
        return _logprobs(*part, head, temperature)

    if chunk == length:
        return one_chunk((hidden, targets))
    count = -(-length // chunk)
    padding = count * chunk - length

    def split(x: Array) -> Array:  # [B, T, ...] -> [count, B, chunk, ...]
        x = jnp.pad(x, [(0, 0), (0, padding)] + [(0, 0)] * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(x.shape[0], count, chunk, *x.shape[2:]), 1, 0)

    def join(x: Array) -> Array:  # [count, B, chunk] -> [B, T]
        return jnp.moveaxis(x, 0, 1).reshape(x.shape[1], -1)[:, :length]

    logprobs, entropy = jax.lax.map(one_chunk, (split(hidden), split(targets)))
    return join(logprobs), join(entropy)


def _logprobs(
    hidden: Array, targets: Array, head: Array, temperature: float
) -> tuple[Array, Array]:
    wide = widen(hidden).dtype
    logits = jnp.einsum(
        "btd,dv->btv", hidden, head.astype(hidden.dtype), preferred_element_type=wide
    )
    table = jax.nn.log_softmax(logits / temperature)  # [B, c, V]
    # A comparison, not a gather: its gradient is no scatter, and V may be sharded.
    chosen = jnp.arange(head.shape[1]) == targets[..., None]
    logprobs = jnp.sum(jnp.where(chosen, table, 0.0), axis=-1)
    return logprobs, -jnp.sum(jnp.exp(table) * table, axis=-1)
