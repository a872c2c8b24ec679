"""Sums over the samples of packed rows, against a loop over them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from learner_jax.loss import segment_sums

TOKENS = 70


@jax.jit
def sums_and_slope(values: jax.Array, ids: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The sums, and the gradient of half the sum of their squares."""
    slope = jax.grad(lambda x: jnp.sum(segment_sums(x, ids) ** 2) / 2)(values)
    return segment_sums(values, ids), slope


@pytest.mark.parametrize(
    "row",
    [[5], [1], [3, 1, 1, 7], [2, 2, 2, 2, 2], [64], [1, 62, 1], [13, 29, 5]],
    ids=lambda row: "-".join(map(str, row)),
)
def test_every_position_has_the_sum_of_its_sample(row: list[int]) -> None:
    # given a row of samples of these lengths, and one that is all padding
    ids = np.repeat(np.arange(1, len(row) + 1), row)
    ids = np.stack([np.pad(ids, (0, TOKENS - len(ids))), np.zeros(TOKENS, int)])
    values = np.random.default_rng(0).normal(size=ids.shape)
    # when
    with jax.enable_x64(True):
        found, slope = sums_and_slope(jnp.asarray(values), ids)
    # then both are those of a loop over the samples
    for r in range(2):
        for sample in np.unique(ids[r]):
            mine = ids[r] == sample
            total = values[r, mine].sum()
            np.testing.assert_allclose(found[r, mine], total, rtol=1e-12, atol=1e-13)
            np.testing.assert_allclose(slope[r, mine], total * mine.sum(), rtol=1e-12, atol=1e-11)


def test_what_is_not_finite_stays_in_its_sample() -> None:
    ids = np.array([[1, 1, 2, 2, 3, 0]])
    values = jnp.array([[1.0, 2.0, jnp.nan, jnp.inf, 4.0, 5.0]])
    found = np.asarray(segment_sums(values, ids))[0]
    np.testing.assert_array_equal(found[[0, 1, 4, 5]], [3.0, 3.0, 4.0, 5.0])
    assert np.isnan(found[2:4]).all()
