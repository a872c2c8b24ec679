"""Log-probs and entropies: the closed form, in chunks, without the logits of the row."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from learner_jax.logprobs import chunk_tokens, token_logprobs

B, T, D, V = 2, 13, 8, 19


def arrays() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.normal(size=(B, T, D)), rng.normal(size=(D, V)), rng.integers(0, V, (B, T))


@pytest.mark.parametrize("chunk", [None, 4, 13])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_logprobs_and_entropy_are_those_of_the_softmax(
    chunk: int | None, temperature: float
) -> None:
    hidden, head, targets = arrays()
    # given the softmax in numpy
    logits = hidden @ head / temperature
    table = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    # when computed in chunks that do or do not divide the row
    logprobs, entropy = token_logprobs(
        jnp.asarray(hidden, jnp.float32),
        jnp.asarray(head, jnp.float32),
        targets,
        temperature=temperature,
        chunk=chunk,
    )
    # then both agree
    expected = np.take_along_axis(table, targets[..., None], -1)[..., 0]
    np.testing.assert_allclose(logprobs, expected, atol=1e-5)
    np.testing.assert_allclose(entropy, -(np.exp(table) * table).sum(-1), atol=5e-5)


def test_chunks_have_the_gradients_of_the_whole() -> None:
    hidden, head, targets = arrays()

    def value(hidden: Any, head: Any, chunk: int) -> jax.Array:
        logprobs, entropy = token_logprobs(hidden, head, targets, temperature=0.9, chunk=chunk)
        return jnp.sum(logprobs * jnp.cos(logprobs) + entropy**2)

    with jax.enable_x64(True):
        found, expected = (
            jax.grad(value, (0, 1))(jnp.asarray(hidden), jnp.asarray(head), chunk)
            for chunk in (4, T)
        )
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12)


def test_logits_of_the_whole_row_never_exist() -> None:
    # given a row whose logits take 64 MiB
    length, vocab, chunk = 4096, 4096, 128
    hidden = jax.ShapeDtypeStruct((1, length, D), jnp.float32)
    head = jax.ShapeDtypeStruct((D, vocab), jnp.float32)
    targets = jax.ShapeDtypeStruct((1, length), jnp.int32)

    def value(hidden: Any, head: Any, targets: Any) -> jax.Array:
        return sum(
            x.sum() for x in token_logprobs(hidden, head, targets, temperature=1.0, chunk=chunk)
        )

    # when forward and backward are compiled
    program = jax.jit(jax.grad(value, (0, 1))).lower(hidden, head, targets).compile()
    # then all temporary memory is that of a few chunks
    assert program.memory_analysis().temp_size_in_bytes < 8 * chunk * vocab * 4


def test_bfloat16_heads_sum_their_gradient_in_float32() -> None:
    # given a float32 head used in bfloat16, and many chunks
    hidden, head, targets = arrays()

    def value(head: jax.Array) -> jax.Array:
        wide = jnp.asarray(hidden, jnp.bfloat16)
        return token_logprobs(wide, head, targets, temperature=1.0, chunk=1)[0].sum()

    # then its gradient is float32
    assert jax.grad(value)(jnp.asarray(head, jnp.float32)).dtype == jnp.float32


def test_chunks_shrink_as_the_vocabulary_grows() -> None:
    assert chunk_tokens(192) > 100_000
    assert chunk_tokens(151_936) == 256
