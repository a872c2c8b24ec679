"""The noise is the same function in numpy, torch and JAX: its bits exactly, its floats nearly."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verify.noise import gumbel, hashed, noise_key, token_words

WORDS = st.integers(-(2**31), 2**31 - 1)
ULPS = 4
"""How far the logarithms of the three libraries may lie apart."""


def libraries() -> list[tuple[Any, Any]]:
    """Each library with what makes an i32 array of it."""
    torch = pytest.importorskip("torch")
    jax = pytest.importorskip("jax")
    return [(torch, torch.from_numpy), (jax.numpy, jax.numpy.asarray)]


def arguments(seed: int, count: int) -> list[np.ndarray]:
    """Keys, positions and tokens, i32 [count, 1] and [1, 50]."""
    rng = np.random.default_rng(seed)
    keys = [rng.integers(-(2**31), 2**31, (count, 1)).astype(np.int32) for _ in range(2)]
    position = rng.integers(0, 1 << 17, (count, 1)).astype(np.int32)
    tokens = rng.integers(0, 1 << 18, (1, 50)).astype(np.int32)
    return [*keys, position, tokens]


@settings(max_examples=30, deadline=None)
@given(seed=WORDS.map(abs))
def test_bits_are_equal_in_all_libraries(seed: int) -> None:
    *row, tokens = arguments(seed, 40)
    with np.errstate(over="ignore"):
        expected = hashed(*row, token_words(tokens))
    assert expected.dtype == np.int32 and (expected >= 0).all()
    for _, array in libraries():
        found = hashed(*map(array, row), token_words(array(tokens)))
        assert np.array_equal(np.asarray(found), expected)


def test_noise_differs_by_a_few_units_in_the_last_place_at_most() -> None:
    given_ = arguments(7, 4000)
    with np.errstate(over="ignore"):
        expected = gumbel(np, *given_)
    assert expected.dtype == np.float32 and np.isfinite(expected).all()
    for library, array in libraries():
        found = np.asarray(gumbel(library, *map(array, given_)))
        assert found.dtype == np.float32
        # Near 0, the logarithm of nearly 1, an error counts relative to 1.
        apart = np.abs(found - expected) / np.spacing(np.maximum(np.abs(expected), 1.0))
        assert apart.max() <= ULPS


def test_noise_is_standard_gumbel() -> None:
    with np.errstate(over="ignore"):
        noise = gumbel(np, *arguments(1, 20_000)).astype(np.float64)
    assert noise.mean() == pytest.approx(np.euler_gamma, abs=0.01)
    assert noise.var() == pytest.approx(np.pi**2 / 6, abs=0.02)


@pytest.mark.parametrize(
    ("step", "of"),
    [
        (1, "token"),
        (1, "position"),
        (2, "position"),
        (1, "key_0"),
        (1 << 31, "key_0"),
        (2, "key_1"),
    ],
)
def test_noise_of_neighbours_is_independent(step: int, of: str) -> None:
    names = ("key_0", "key_1", "position", "token")
    given_ = dict(zip(names, arguments(2, 20_000), strict=True))
    with np.errstate(over="ignore"):
        noise = gumbel(np, *given_.values())
        given_[of] = given_[of] ^ np.array(step, np.uint32).astype(np.int32)
        other = gumbel(np, *given_.values())
    # A million pairs: 4 standard deviations of a correlation of nothing.
    correlation = np.corrcoef(noise.ravel(), other.ravel())[0, 1]
    assert abs(correlation) < 4e-3
    assert abs(np.corrcoef((noise > 3.0).ravel(), (other > 3.0).ravel())[0, 1]) < 4e-3


def test_keys_of_rollouts_are_all_different() -> None:
    seeds = (b"\1" * 32, b"\2" * 32)
    keys = {noise_key(s, g, n) for s in seeds for g in range(20) for n in range(20)}
    assert len(keys) == 800
