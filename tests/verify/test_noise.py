"""Noise, log-probs, gaps and distributions: one definition in numpy, torch and JAX."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verify.checks.distribution import ALPHA, END_NAMES, NAMES, end_sums, evidence, log_ratios
from verify.choices import HEADS, POWERS, Choices, describe
from verify.noise import gumbel, hashed, noise_key, token_words
from verify.token_facts import Drawn, Vocabulary, Wanted, facts_of, token_facts
from verify.truncation import Truncation, thresholds

LIBRARIES = [(torch, torch.from_numpy), (jnp, jnp.asarray)]
"""Each with what makes an array of one of numpy's."""

# --- noise --------------------------------------------------------------------------------------


def arguments(seed: int, count: int) -> list[np.ndarray]:
    """Keys, positions and tokens, i32 [count, 1] and [1, 50]."""
    rng = np.random.default_rng(seed)
    keys = [rng.integers(-(2**31), 2**31, (count, 1)).astype(np.int32) for _ in range(2)]
    position = rng.integers(0, 1 << 17, (count, 1)).astype(np.int32)
    return [*keys, position, rng.integers(0, 1 << 18, (1, 50)).astype(np.int32)]


@settings(max_examples=20, derandomize=True)
@given(seed=st.integers(0, 2**31))
def test_bits_are_equal_in_all_libraries(seed: int) -> None:
    *row, tokens = arguments(seed, 40)
    with np.errstate(over="ignore"):
        expected = hashed(*row, token_words(tokens))
    assert expected.dtype == np.int32 and (expected >= 0).all()
    for _, array in LIBRARIES:
        found = hashed(*map(array, row), token_words(array(tokens)))
        assert np.array_equal(np.asarray(found), expected)


def test_noise_is_standard_gumbel_and_differs_by_four_units_in_the_last_place_at_most() -> None:
    drawn = arguments(7, 20_000)
    with np.errstate(over="ignore"):
        expected = gumbel(np, *drawn)
    assert expected.dtype == np.float32 and np.isfinite(expected).all()
    assert expected.mean(dtype=np.float64) == pytest.approx(np.euler_gamma, abs=0.01)
    assert expected.var(dtype=np.float64) == pytest.approx(np.pi**2 / 6, abs=0.02)
    for library, array in LIBRARIES:
        found = np.asarray(gumbel(library, *map(array, drawn)))
        assert found.dtype == np.float32
        # Near 0, the logarithm of nearly 1, an error counts relative to 1.
        apart = np.abs(found - expected) / np.spacing(np.maximum(np.abs(expected), 1.0))
        assert apart.max() <= 4


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
    drawn = dict(zip(("key_0", "key_1", "position", "token"), arguments(2, 20_000), strict=True))
    with np.errstate(over="ignore"):
        noise = gumbel(np, *drawn.values())
        drawn[of] = drawn[of] ^ np.array(step, np.uint32).astype(np.int32)
        other = gumbel(np, *drawn.values())
    # A million pairs: 4 standard deviations of a correlation of nothing.
    assert abs(np.corrcoef(noise.ravel(), other.ravel())[0, 1]) < 4e-3
    assert abs(np.corrcoef((noise > 3.0).ravel(), (other > 3.0).ravel())[0, 1]) < 4e-3


def test_keys_of_rollouts_are_all_different() -> None:
    seeds = (b"\1" * 32, b"\2" * 32)
    keys = {noise_key(s, g, n) for s in seeds for g in range(20) for n in range(20)}
    assert len(keys) == 800


# --- log-probs and gaps, the short way ----------------------------------------------------------

# Nats below the top: 69 are those at which `exp` underflows here, 88 and 104 those of float32.
BELOW = (0, 60, 65, 68, 70, 75, 80, 85, 87, 90, 95, 100, 104, 110, 300)
MANY = 1000


def rows() -> tuple[np.ndarray, list[np.ndarray]]:
    """f32 [n, V] logits / T over 300 nats, and i32 [n, 1] token, position and words of the key."""
    rng = np.random.default_rng(0)
    below = np.repeat(np.array(BELOW, float), 8)
    at, scaled = np.arange(len(below)), -rng.uniform(0, 300, (len(below), MANY))
    token = rng.integers(0, MANY, len(below))
    scaled[at, (token + 1) % MANY] = 0
    scaled[at, token] = -below
    scaled += rng.uniform(-30, 30, (len(below), 1))  # of a row, all shifted alike
    keys = rng.integers(-(2**31), 2**31, (2, len(below)))
    columns = (token, rng.integers(0, 5000, len(below)), *keys)
    return scaled.astype(np.float32), [column.astype(np.int32)[:, None] for column in columns]


@pytest.mark.parametrize(
    ("xp", "array"), [(np, np.asarray), *LIBRARIES], ids=["numpy", "torch", "jax"]
)
def test_the_short_way_says_what_the_definition_says(xp: Any, array: Any) -> None:
    scaled, (token, *noise) = rows()
    words = np.arange(MANY, dtype=np.int32)[None]
    with np.errstate(over="ignore"):
        winner = (scaled + gumbel(np, noise[1], noise[2], noise[0], words)).argmax(-1)
    wanted = Wanted(gaps=True, choices=False, truncation=None)
    # given tokens at the top, at the edge of underflow and far beyond, and those that win
    for tokens in (token, winner.astype(np.int32)[:, None]):
        ids, drawn = array(words), Drawn(*map(array, (tokens, *noise)))
        with np.errstate(over="ignore"):
            short = facts_of(xp, array(scaled), drawn, Vocabulary.of(ids), 0, wanted)
            noisy = gumbel(xp, drawn.key_0, drawn.key_1, drawn.position, ids)
        full = token_facts(xp, array(scaled), noisy, ids == drawn.token, ids == 0, wanted)
        logprobs, gaps, expected, expected_gaps = map(
            np.asarray, (short.logprobs, short.gaps, full.logprobs, full.gaps)
        )
        assert np.isfinite(gaps).all() and np.isfinite(logprobs).all()
        np.testing.assert_allclose(gaps, expected_gaps, rtol=0, atol=1e-4)
        np.testing.assert_allclose(logprobs, expected, rtol=0, atol=1e-4)
    # and the winner's gap is 0 and no rounding of 0
    assert (gaps == 0).all() and (expected_gaps == 0).all()


# --- distributions ------------------------------------------------------------------------------

VOCABULARY, END = 40, 0
RULES = [None, Truncation(0.8, -1, 0.1), Truncation(1.0, 6, 0.1), Truncation(0.9, 12, 1e-3)]


def logits(positions: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    scale = rng.uniform(0.3, 3.0, size=(positions, 1))
    return (scale * rng.normal(size=(positions, VOCABULARY))).astype(np.float32)


def described(
    scaled: np.ndarray,
    tokens: np.ndarray,
    rule: Truncation | None = None,
    xp: Any = np,
    array: Any = np.asarray,
) -> Choices:
    ids = np.arange(VOCABULARY)[None]
    return describe(xp, *map(array, (scaled, ids == tokens[:, None], ids == END)), rule)


def kept_probabilities(scaled: np.ndarray, rule: Truncation | None) -> np.ndarray:
    """f64 [n, V]."""
    weights = np.exp(scaled.astype(np.float64))
    if rule is not None:
        weights *= scaled >= thresholds(np, scaled, rule).kept
    return weights / weights.sum(-1, keepdims=True)


def drawn_from(probabilities: np.ndarray, seed: int) -> np.ndarray:
    """A token of each position."""
    chance = np.random.default_rng(seed).uniform(size=(len(probabilities), 1))
    return (probabilities.cumsum(-1) < chance).sum(-1)


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_each_number_of_a_distribution_is_its_definition(rule: Truncation | None) -> None:
    # given tokens that are kept
    scaled = logits(200)
    p = kept_probabilities(scaled, rule)
    tokens = drawn_from(p, 1)
    found = described(scaled, tokens, rule)
    # then the sums over the vocabulary are those of float64
    mine = p[np.arange(len(p)), tokens]
    np.testing.assert_allclose(found.logprobs, np.log(mine), atol=1e-5)
    np.testing.assert_allclose(found.below_top, np.log(p.max(-1) / mine), atol=1e-5)
    for column, a in enumerate(POWERS):
        np.testing.assert_allclose(found.log_powers[:, column], np.log((p**a).sum(-1)), atol=1e-5)
    for column, c in enumerate(HEADS):
        head = np.where(p >= c * p.max(-1, keepdims=True) * (1 - 1e-6), p, 0.0).sum(-1)
        np.testing.assert_allclose(found.log_heads[:, column], np.log(head), atol=1e-5)
    # and the end token's share lies between the two that are given
    with np.errstate(divide="ignore"):
        end = np.log(p[:, END])
    assert (found.end_least <= end + 1e-5).all() and (found.end_most >= end - 1e-5).all()
    assert (found.outside == 0.0).all()
    if rule is None:
        assert (found.sure == 1.0).all()
        np.testing.assert_allclose(found.end_least, end, atol=1e-5)
    # and torch and JAX say the same
    for xp, array in LIBRARIES:
        for name, values in described(scaled, tokens, rule, xp, array)._asdict().items():
            expected = getattr(found, name)
            np.testing.assert_allclose(np.asarray(values), expected, atol=1e-5, err_msg=name)


def test_a_token_that_nobody_keeps_lies_outside() -> None:
    scaled = logits(100)
    found = described(scaled, scaled.argmin(-1), Truncation(0.5, -1, 1e-3))
    assert (found.outside > 0.1).mean() > 0.9 and (found.sure == 0.0).all()


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_the_ratios_of_every_alternative_have_mean_one(rule: Truncation | None) -> None:
    """Exactly so: the sum over the vocabulary, each token weighed with its probability.

    Tokens at an edge may only lower it."""
    scaled = logits(50)
    p = kept_probabilities(scaled, rule)
    mean = np.zeros((len(p), len(NAMES)))
    for token in range(VOCABULARY):
        kept = p[:, token] > 0
        ratios = log_ratios(described(scaled, np.full(len(p), token), rule))
        mean[kept] += p[kept, token, None] * np.exp(ratios[kept])
    assert (mean <= 1 + 1e-4).all()
    if rule is None:
        np.testing.assert_allclose(mean, 1.0, atol=1e-4)


def test_honest_evidence_keeps_markovs_bound() -> None:
    rollouts, length = 1000, 50
    scaled = logits(rollouts * length)
    tokens = drawn_from(kept_probabilities(scaled, None), 0)
    ratios = log_ratios(described(scaled, tokens)).reshape(rollouts, length, -1).sum(1)
    found = np.array([evidence(row)[0] for row in ratios])
    for level in (0.5, 0.1, 0.01):
        assert (found >= math.log(1 / level)).mean() <= level
    assert found.max() < math.log(1 / ALPHA)


@pytest.mark.parametrize(
    ("temperature", "words"),
    [(0.0, "nothing below 1 of"), (0.7, "temperature / 1.5"), (1.4, "temperature / 0.75")],
)
def test_another_temperature_is_named(temperature: float, words: str) -> None:
    scaled = logits(2000)
    tokens = scaled.argmax(-1)
    if temperature:
        tokens = drawn_from(kept_probabilities(scaled / temperature, None), 2)
    value, said = evidence(log_ratios(described(scaled, tokens)).sum(0))
    assert value > math.log(2 / ALPHA) and words in said


def with_ends(hazard: np.ndarray) -> Choices:
    """Of a rollout with these probabilities of the end token."""
    log_end = np.log(hazard).astype(np.float32)
    nothing = np.zeros_like(log_end)
    return Choices(*[nothing] * 4, log_end, log_end, nothing, nothing)


def test_the_ratios_of_ends_have_mean_one() -> None:
    """Over every way in which a rollout can end, each weighed with its probability."""
    hazard = np.random.default_rng(3).beta(0.3, 2.0, size=30)
    alive, mean = 1.0, np.zeros(len(END_NAMES))
    for n in range(1, len(hazard) + 1):
        sums = end_sums(with_ends(hazard[:n]), ended=True, tau=0.0)
        mean += alive * hazard[n - 1] * np.exp(sums)
        alive *= 1 - hazard[n - 1]
    mean += alive * np.exp(end_sums(with_ends(hazard), ended=False, tau=0.0))
    np.testing.assert_allclose(mean, 1.0, rtol=1e-4)
    # and an end that is as good as certain convicts nobody
    assert end_sums(with_ends(np.array([0.01, 1.0])), ended=True, tau=0.0).max() < 1.0
