"""Packed attention with the whole T x T matrix in numpy, and its gradients by the chain rule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

PADDING = 0
Arrays = tuple[np.ndarray, np.ndarray, np.ndarray]


def packed_rows(*rows: Sequence[int], length: int) -> np.ndarray:
    """Segment ids [rows, length] from the lengths of each row's segments; padding at the end.

    A negative length is a hole: padding between segments.
    """
    ids = np.full((len(rows), length), PADDING, np.int32)
    for row, lengths in zip(ids, rows, strict=True):
        begin = 0
        for number, count in enumerate(lengths, start=1):
            if count > 0:
                row[begin : begin + count] = number
            begin += abs(count)
        assert begin <= length
    return ids


def random_arrays(
    ids: np.ndarray, heads: int, kv_heads: int, size: int, *, scale: float = 1.0
) -> Arrays:
    """Queries, keys and values, float64."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(*ids.shape, n, size)) for n in (heads, kv_heads, kv_heads))
    return q * scale, k, v


def weight_of(q: np.ndarray) -> np.ndarray:
    """What the outputs are multiplied with in `loss`: the gradient of each."""
    return np.random.default_rng(1).normal(size=q.shape)


def dense(q: Any, k: Any, v: Any, ids: np.ndarray) -> tuple[np.ndarray, ...]:
    """The output and the gradients of sum(output * weight) by q, k and v, all in float64."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    group, size = q.shape[2] // k.shape[2], q.shape[3]
    keys, values = (np.repeat(x, group, axis=2) for x in (k, v))
    column = np.arange(ids.shape[1])
    sees = (ids[:, :, None] == ids[:, None, :]) & (column[:, None] >= column)
    sees &= (ids != PADDING)[:, :, None]
    scores = np.einsum("bqnh,btnh->bnqt", q, keys) / np.sqrt(size)
    scores = np.where(sees[:, None], scores, -np.inf)
    top = np.where(sees.any(-1)[:, None], scores.max(-1), 0.0)
    p = np.exp(scores - top[..., None])
    p = p / np.where(sees.any(-1)[:, None], p.sum(-1), 1.0)[..., None]
    out = np.einsum("bnqt,btnh->bqnh", p, values)
    d_out = weight_of(q)
    d_p = np.einsum("bqnh,btnh->bnqt", d_out, values)
    d_scores = p * (d_p - (p * d_p).sum(-1, keepdims=True)) / np.sqrt(size)
    dq = np.einsum("bnqt,btnh->bqnh", d_scores, keys)
    dk = np.einsum("bnqt,bqnh->btnh", d_scores, q)
    dv = np.einsum("bnqt,bqnh->btnh", p, d_out)

    def grouped(x: np.ndarray) -> np.ndarray:
        return x.reshape(*x.shape[:2], -1, group, size).sum(3)

    return out, dq, grouped(dk), grouped(dv)


def computed(
    attend: Callable[..., jax.Array], arrays: Sequence[Any], ids: np.ndarray
) -> tuple[np.ndarray, ...]:
    """What `dense` gives, by `attend(q, k, v, ids)` under jit."""
    weight = weight_of(arrays[0])

    def loss(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
        out = attend(q, k, v, jnp.asarray(ids))
        return jnp.sum(out * weight.astype(out.dtype)), out

    grads, out = jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))(*map(jnp.asarray, arrays))
    return tuple(np.asarray(x, np.float64) for x in (out, *grads))


def assert_dense(
    attend: Callable[..., jax.Array], arrays: Sequence[Any], ids: np.ndarray, limit: float
) -> None:
    """Output and gradients are those of `dense`, within `limit` of their norms, and exact zeros at
    padding."""
    found, expected = computed(attend, arrays, ids), dense(*arrays, ids)
    for name, a, b in zip(("out", "dq", "dk", "dv"), found, expected, strict=True):
        error = np.linalg.norm(a - b) / np.linalg.norm(b)
        assert error < limit, f"{name}: {error:.1e}"
        assert not a[ids == PADDING].any(), f"{name} at padding"
