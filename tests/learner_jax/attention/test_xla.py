"""Packed attention against one segment at a time in float64 numpy."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from learner_jax.attention import xla

HEADS, KV_HEADS, SIZE = 6, 2, 8


def inputs_of(length: int, scale: float = 1.0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    shapes = ((2, length, n, SIZE) for n in (HEADS, KV_HEADS, KV_HEADS))
    q, k, v = (rng.normal(size=shape).astype(np.float32) for shape in shapes)
    return q * scale, k, v


def segments_of(length: int) -> np.ndarray:
    """Uneven segments, one of a single token, padding between nothing and at the end; a row of
    padding only."""
    ids = np.zeros((2, length), np.int32)
    first, second = length // 2 + 1, length // 2 + 2
    ids[0, :first], ids[0, first:second], ids[0, second : length - 3] = 1, 2, 3
    return ids


def plain(q: np.ndarray, k: np.ndarray, v: np.ndarray, segments: np.ndarray) -> np.ndarray:
    out = np.zeros(q.shape)
    for row in range(len(q)):
        for t in np.flatnonzero(segments[row]):
            keys = [s for s in range(t + 1) if segments[row, s] == segments[row, t]]
            for head in range(HEADS):
                kv = head // (HEADS // KV_HEADS)
                scores = k[row, keys, kv].astype(np.float64) @ q[row, t, head] / np.sqrt(SIZE)
                weights = np.exp(scores - scores.max())
                out[row, t, head] = weights / weights.sum() @ v[row, keys, kv]
    return out


# One row within a block; several blocks, the last one not full.
@pytest.mark.parametrize("length", [24, 2 * xla.BLOCK + 64])
def test_each_segment_attends_to_itself_alone(length: int) -> None:
    q, k, v = inputs_of(length)
    segments = segments_of(length)
    found = jax.jit(xla.attend)(q, k, v, segments)
    np.testing.assert_allclose(found, plain(q, k, v, segments), atol=1e-5)


def test_strongly_negative_scores_do_not_disturb_the_mask() -> None:
    # given scores down to some -1e4, where a mask of small numbers would leak
    q, k, v = inputs_of(24, scale=1e4)
    found = xla.attend(q, k, v, segments_of(24))
    np.testing.assert_allclose(found, plain(q, k, v, segments_of(24)), atol=1e-3)


def test_blocks_have_the_gradients_of_the_whole() -> None:
    # given a row of three blocks and the same row attended at once
    length = 2 * xla.BLOCK + 64
    arrays, segments = inputs_of(length), segments_of(length)
    weight = np.random.default_rng(1).normal(size=(2, length, HEADS, SIZE)).astype(np.float32)

    def blocked(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return jnp.sum(xla.attend(q, k, v, segments) * weight)

    def at_once(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return jnp.sum(xla._attend(q, k, v, segments, segments, 0) * weight)

    # when both are differentiated, inside a remat as the layers are
    found, expected = (
        jax.jit(jax.grad(jax.checkpoint(f), (0, 1, 2)))(*arrays) for f in (blocked, at_once)
    )
    # then gradients agree, and padding has none
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4)
        assert not np.asarray(a)[segments == 0].any()


def test_bfloat16_stays_near_float32() -> None:
    q, k, v = (x.astype(jnp.bfloat16) for x in inputs_of(24))
    found = xla.attend(q, k, v, segments_of(24))
    assert found.dtype == jnp.bfloat16
    expected = plain(*(np.asarray(x, np.float32) for x in (q, k, v)), segments_of(24))
    np.testing.assert_allclose(np.asarray(found, np.float32), expected, atol=0.03)
