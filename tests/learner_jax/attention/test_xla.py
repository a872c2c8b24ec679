"""Attention in plain XLA against the whole matrix in float64."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from learner_jax.attention import xla
from tests.learner_jax.attention.dense import (
    assert_dense,
    computed,
    dense,
    packed_rows,
    random_arrays,
)

SHORT = packed_rows([1, 13, 1, 6, -2, 3], [], length=29)
LONG = packed_rows([150, 1, 1, 90, -20, 50], [20, 280], length=320)
"""Segments over several tiles of queries, a hole, tiles of padding; 320 % 128 = 64."""


def attend(q: jax.Array, k: jax.Array, v: jax.Array, ids: jax.Array) -> jax.Array:
    return xla.attend(q, k, v, ids, jnp.arange(ids.shape[1], dtype=jnp.int32))


@pytest.mark.parametrize("ids", [SHORT, LONG], ids=["at once", "in tiles"])
@pytest.mark.parametrize("kv_heads", [1, 2, 6])
def test_output_and_gradients_are_exact_in_float64(ids: np.ndarray, kv_heads: int) -> None:
    arrays = random_arrays(ids, 6, kv_heads, 4)
    with jax.enable_x64(True):
        assert_dense(attend, arrays, ids, 1e-13)


@pytest.mark.parametrize("ids", [SHORT, LONG], ids=["at once", "in tiles"])
@pytest.mark.parametrize(("dtype", "limit"), [("float32", 2e-6), ("bfloat16", 2e-2)])
def test_narrow_types_stay_near(ids: np.ndarray, dtype: str, limit: float) -> None:
    arrays = [jnp.asarray(x, dtype) for x in random_arrays(ids, 4, 2, 8)]
    assert_dense(attend, arrays, ids, limit)


@pytest.mark.parametrize("ids", [SHORT, LONG], ids=["at once", "in tiles"])
def test_strongly_negative_scores_do_not_disturb_the_mask(ids: np.ndarray) -> None:
    # given scores down to some -1e5, where a mask of small numbers would leak
    arrays = random_arrays(ids, 4, 2, 4, scale=1e5)
    found = computed(attend, arrays, ids)
    # then every number is finite, and the output that of the exact softmax of these scores
    assert all(np.isfinite(x).all() for x in found)
    expected, *_ = dense(*arrays, ids)
    assert np.linalg.norm(found[0] - expected) / np.linalg.norm(expected) < 1e-3


def test_inside_remat_and_scan_as_in_the_layers() -> None:
    # given two layers, each feeding attention's output to the next one's queries
    arrays = random_arrays(LONG, 4, 2, 4)

    def layers(transform: Any, scan: Any) -> Any:
        def stack(q: jax.Array, k: jax.Array, v: jax.Array, ids: jax.Array) -> jax.Array:
            def layer(q: jax.Array, scale: jax.Array) -> tuple[jax.Array, None]:
                return q + attend(q * scale, k, v, ids), None

            return scan(transform(layer), q, jnp.array([1.0, 0.5]))[0]

        return stack

    def unrolled(layer: Any, q: jax.Array, scales: jax.Array) -> tuple[jax.Array, None]:
        for scale in scales:
            q, _ = layer(q, scale)
        return q, None

    policy = jax.checkpoint_policies.save_only_these_names(xla.SAVED)
    with jax.enable_x64(True):
        expected = computed(layers(lambda layer: layer, unrolled), arrays, LONG)
        for transform in (jax.checkpoint, lambda f: jax.checkpoint(f, policy=policy)):
            found = computed(layers(transform, jax.lax.scan), arrays, LONG)
            # then output and gradients are those of the plain layers
            for a, b in zip(found, expected, strict=True):
                np.testing.assert_allclose(a, b, atol=1e-12)


def test_a_policy_that_saves_attention_spares_the_second_forward_pass() -> None:
    # given a remat that keeps what attention names, and one that keeps nothing
    arrays = [jnp.asarray(x, jnp.float32) for x in random_arrays(LONG, 4, 2, 8)]

    def exponentials(policy: Any) -> int:
        def loss(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            kept = jax.checkpoint(lambda *x: jnp.sum(attend(*x, LONG)), policy=policy)
            return kept(q, k, v)

        return str(jax.make_jaxpr(jax.grad(loss, (0, 1, 2)))(*arrays)).count(" exp ")

    policies = jax.checkpoint_policies
    # then the one forward pass has two exponentials and the backward pass one
    assert exponentials(policies.save_only_these_names(xla.SAVED)) == 3
    assert exponentials(policies.nothing_saveable) == 5


def test_memory_grows_with_the_row_not_with_its_square() -> None:
    # given the gradient at 32k tokens
    length = 32768
    q, k = (jax.ShapeDtypeStruct((1, length, n, 8), jnp.float32) for n in (4, 2))
    ids = jax.ShapeDtypeStruct((1, length), jnp.int32)

    def loss(q: jax.Array, k: jax.Array, v: jax.Array, ids: jax.Array) -> jax.Array:
        return jnp.sum(attend(q, k, v, ids))

    compiled = jax.jit(jax.grad(loss, (0, 1, 2))).lower(q, k, k, ids).compile()
    # then it takes some copies of the queries, 4 MiB each, not scores of 4 x 32k x 32k
    assert compiled.memory_analysis().temp_size_in_bytes < 64 * 2**20
