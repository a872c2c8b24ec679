"""Noise, log-probs, gaps, distributions and their cuts: one definition in numpy, torch and JAX."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from tests.verify.bench import MODEL, Bench
from verify.checks.prefill import ALPHA, END_NAMES, NAMES, end_sums, evidence, log_ratios
from verify.noise import gumbel, hashed, noise_key, token_words
from verify.recompute import Drawn, Vocabulary, Wanted, facts_of, token_facts
from verify.truncation import (
    HEADS,
    POWERS,
    Choices,
    Truncation,
    describe,
    judged,
    kept_from,
    thresholds,
)

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
    [(1, "token"), (1, "position"), (1, "key_0"), (1 << 31, "key_0"), (2, "key_1")],
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
        sums = end_sums(with_ends(hazard[:n]), ended=np.arange(n) == n - 1, tau=0.0)
        mean += alive * hazard[n - 1] * np.exp(sums)
        alive *= 1 - hazard[n - 1]
    mean += alive * np.exp(end_sums(with_ends(hazard), ended=hazard > 1, tau=0.0))
    np.testing.assert_allclose(mean, 1.0, rtol=1e-4)
    # and an end that is as good as certain convicts nobody
    certain = np.array([0.01, 1.0, 0.01, 1.0])  # of two turns
    assert end_sums(with_ends(certain), ended=certain == 1, tau=0.0).max() < 1.0


# --- top-k and top-p ----------------------------------------------------------------------------

CUTS = [Truncation(*rule) for rule in ((0.9, -1), (0.05, -1), (1.0, 20), (0.7, 30))]
SMALL_ROWS = arrays(np.float32, 40, elements=st.floats(-8, 8, width=32))


def keeping(rule: Truncation) -> dict[str, Any]:
    return {
        "top_p": rule.top_p if rule.top_p < 1.0 else None,
        "top_k": rule.top_k if rule.top_k > 0 else None,
    }


def kept_by_sorting(row: np.ndarray, rule: Truncation) -> np.ndarray:
    """The definition, in float64: bool [V]."""
    order = np.argsort(-row, kind="stable")
    kept = np.zeros(len(row), bool)
    kth = row[order[min(rule.top_k, len(row)) - 1]] if rule.top_k > 0 else -np.inf
    left = [token for token in order if row[token] >= kth]
    weights = np.exp(row[left].astype(np.float64) - row.max())
    weights /= weights.sum()
    for token in left:
        kept[token] = weights[row[left] > row[token]].sum() < rule.top_p
    return kept


@pytest.mark.slow
@pytest.mark.parametrize("rule", CUTS, ids=str)
def test_every_library_keeps_what_the_definition_keeps(rule: Truncation) -> None:
    rows = (3 * np.random.default_rng(0).normal(size=(200, 300))).astype(np.float32)
    least = kept_from(np, rows, **keeping(rule))
    assert least.shape == (len(rows), 1) and least.dtype == np.float32
    expected = np.stack([kept_by_sorting(row, rule) for row in rows])
    # A sum in float32 may fall on the other side of top_p than one in float64.
    assert ((rows >= least) == expected).all(axis=1).mean() > 0.99
    assert (rows == least).any(axis=1).all()

    def loop(count: int, step: Any, state: Any) -> Any:
        return jax.lax.fori_loop(0, count, lambda _, reached: step(reached), state)

    compiled = jax.jit(lambda x: kept_from(jnp, x, **keeping(rule), repeat=loop))
    in_torch = torch.from_numpy(rows)
    assert (kept_from(torch, in_torch, **keeping(rule)).numpy() == least).mean() > 0.99
    assert (np.asarray(compiled(rows)) == least).mean() > 0.99
    # and they are sure of the same where both may be off
    margin = replace(rule, margin=0.1)
    here = rows >= thresholds(np, rows, margin).sure
    theirs = (in_torch >= thresholds(torch, in_torch, margin).sure).numpy()
    assert (theirs == here).mean() > 0.999
    assert (np.asarray(rows >= thresholds(jnp, rows, margin).sure) == here).mean() > 0.999


def test_equals_at_the_threshold_share_their_fate() -> None:
    row = np.log(np.array([0.4, 0.2, 0.2, 0.2], np.float32))
    assert (row >= kept_from(np, row, top_k=2)).tolist() == [True] * 4
    assert (row >= kept_from(np, row, top_p=0.5)).tolist() == [True] * 4
    assert (row >= kept_from(np, row, top_p=0.3)).tolist() == [True, False, False, False]


@pytest.mark.slow
@settings(max_examples=100, derandomize=True)
@given(
    row=SMALL_ROWS,
    top_p=st.floats(0.05, 0.99),
    top_k=st.sampled_from([-1, 1, 5, 20]),
    seed=st.integers(0, 2**32 - 1),
)
def test_what_a_sampler_keeps_is_allowed_and_what_is_sure_it_keeps(
    row: np.ndarray, top_p: float, top_k: int, seed: int
) -> None:
    """Whatever each logit is off by, up to half the margin."""
    off = np.random.default_rng(seed).uniform(-0.05, 0.05, row.shape)
    # Exact equals at the kth place would be kept beyond k by one side alone: no rounding does that.
    if len(np.unique(row)) < len(row):
        row = row + np.arange(len(row), dtype=np.float32) * 1e-5
    sampler = (row + off).astype(np.float32)
    theirs = sampler >= kept_from(np, sampler, **keeping(Truncation(top_p, top_k)))
    ours = thresholds(np, row, Truncation(top_p, top_k, 0.1))
    slack = 1e-4  # float32 sums
    assert (row[theirs] >= ours.allowed - slack).all()
    assert theirs[row >= ours.sure + slack].all()
    assert ours.allowed <= ours.kept


def test_gaps_and_log_probs_are_of_the_tokens_that_may_be_kept() -> None:
    # of two all but equal either may be the only one
    row, noise = np.log(np.array([[0.48, 0.47, 0.05], np.exp([9, 0, 0])], np.float32))
    for rule in (Truncation(top_k=1, margin=0.1), Truncation(top_p=0.4, margin=0.1)):
        gaps = [judged(np, row, noise, np.arange(3) == token, rule)[1] for token in range(3)]
        assert gaps[0] == gaps[1] == 0.0 and gaps[2] > 1.0
    # one outside, which would win were it kept, is as far below as its distance and the margin
    row, noise = np.array([4.0, 3.0, -5.0], np.float32), np.array([0.0, 0.0, 50.0], np.float32)
    logprob, gap = judged(np, row, noise, np.arange(3) == 2, Truncation(top_k=2, margin=0.1))
    assert gap == pytest.approx(0.1 + (3.0 - 0.1) + 5.0) and np.isfinite(logprob)
    # and a log-prob is of those kept alone
    logprob, gap = judged(np, row, 0 * noise, np.arange(3) == 1, Truncation(top_k=2))
    assert logprob == pytest.approx(-np.log(1 + np.e), abs=1e-6) and gap == 1.0


@pytest.mark.slow
# --- submissions of pools that cut --------------------------------------------------------------
def test_more_than_one_edge_is_not_explained(tmp_path: Path) -> None:
    # given outputs of up to 40 tokens, with log-probs that are off by the bound all along
    sampling = {"temperature": 0.8, "top_p": 0.7, "seeded": True}
    bench = Bench(tmp_path, dtype="bfloat16", sampling=sampling)
    bench.worker.model = MODEL.in_bfloat16()
    rollouts = bench.honest()
    assert bench.verdict(rollouts).accepted
    tampered = [replace(row, logprobs=row.logprobs + math.log(0.7)) for row in rollouts]
    assert bench.verdict(tampered).reason.startswith("logprobs_submission: ")
    # or of one of them alone
    longest = max(range(len(rollouts)), key=lambda number: len(rollouts[number].output_tokens))
    rollouts[longest] = tampered[longest]
    assert not bench.verdict(rollouts).accepted
