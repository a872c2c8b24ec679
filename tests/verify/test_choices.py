"""What distributions say of unseeded tokens: against the definitions, and what honest ones show."""

from __future__ import annotations

import math

import numpy as np
import pytest

from verify.checks.distribution import ALPHA, END_NAMES, NAMES, end_sums, evidence, log_ratios
from verify.choices import HEADS, POWERS, Choices, describe
from verify.truncation import Truncation, thresholds

VOCABULARY, END = 40, 0
RULES = [None, Truncation(0.8, -1, 0.1), Truncation(1.0, 6, 0.1), Truncation(0.9, 12, 1e-3)]


def logits(positions: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    scale = rng.uniform(0.3, 3.0, size=(positions, 1))
    return (scale * rng.normal(size=(positions, VOCABULARY))).astype(np.float32)


def described(scaled: np.ndarray, tokens: np.ndarray, rule: Truncation | None = None) -> Choices:
    ids = np.arange(VOCABULARY)[None]
    return describe(np, scaled, ids == tokens[:, None], ids == END, rule)


def kept_probabilities(scaled: np.ndarray, rule: Truncation | None) -> np.ndarray:
    """f64 [n, V]."""
    weights = np.exp(scaled.astype(np.float64))
    if rule is not None:
        weights *= scaled >= thresholds(np, scaled, rule).kept
    return weights / weights.sum(-1, keepdims=True)


def drawn(probabilities: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """A token of each position."""
    return (probabilities.cumsum(-1) < rng.uniform(size=(len(probabilities), 1))).sum(-1)


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_each_number_is_its_definition(rule: Truncation | None) -> None:
    # given tokens that are kept
    scaled = logits(200)
    p = kept_probabilities(scaled, rule)
    tokens = drawn(p, np.random.default_rng(1))
    # when they are described
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
    assert (found.end_least <= end + 1e-5).all()
    assert (found.end_most >= end - 1e-5).all()
    assert (found.outside == 0.0).all()
    if rule is None:
        assert (found.sure == 1.0).all()
        np.testing.assert_allclose(found.end_least, end, atol=1e-5)


def test_a_token_that_nobody_keeps_lies_outside() -> None:
    scaled, rule = logits(100), Truncation(0.5, -1, 1e-3)
    found = described(scaled, scaled.argmin(-1), rule)
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


def honest_evidence(seed: int, rollouts: int = 400, length: int = 50) -> np.ndarray:
    """log e of honest rollouts, each alone."""
    rng = np.random.default_rng(seed)
    scaled = logits(rollouts * length, seed)
    tokens = drawn(kept_probabilities(scaled, None), rng)
    ratios = log_ratios(described(scaled, tokens)).reshape(rollouts, length, -1).sum(1)
    return np.array([evidence(row)[0] for row in ratios])


def test_honest_evidence_keeps_markovs_bound() -> None:
    found = np.concatenate([honest_evidence(seed) for seed in range(5)])
    for level in (0.5, 0.1, 0.01):
        assert (found >= math.log(1 / level)).mean() <= level
    assert found.max() < math.log(1 / ALPHA)


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.4], ids=["greedy", "cooler", "warmer"])
def test_another_temperature_is_named(temperature: float) -> None:
    scaled = logits(2000)
    if temperature:
        p = kept_probabilities(scaled / temperature, None)
        tokens = drawn(p, np.random.default_rng(2))
    else:
        tokens = scaled.argmax(-1)
    value, words = evidence(log_ratios(described(scaled, tokens)).sum(0))
    assert value > math.log(2 / ALPHA)
    expected = {0.0: "nothing below 1 of", 0.7: "temperature / 1.5", 1.4: "temperature / 0.75"}
    assert expected[temperature] in words


def with_ends(hazard: np.ndarray) -> Choices:
    """Of a rollout with these probabilities of the end token."""
    log_end = np.log(hazard).astype(np.float32)
    nothing = np.zeros_like(log_end)
    return Choices(*[nothing] * 4, log_end, log_end, nothing, nothing)


def mean_of_ratios(hazard: np.ndarray, true: np.ndarray, tau: float) -> np.ndarray:
    """Of each alternative's product over every way in which a rollout can end, weighed."""
    alive, mean = 1.0, np.zeros(len(END_NAMES))
    for n in range(1, len(hazard) + 1):
        sums = end_sums(with_ends(hazard[:n]), ended=True, tau=tau)
        mean += alive * true[n - 1] * np.exp(sums)
        alive *= 1 - true[n - 1]
    return mean + alive * np.exp(end_sums(with_ends(hazard), ended=False, tau=tau))


def test_the_ratios_of_ends_have_mean_one() -> None:
    hazard = np.random.default_rng(3).beta(0.3, 2.0, size=30)
    np.testing.assert_allclose(mean_of_ratios(hazard, hazard, 0.0), 1.0, rtol=1e-4)


def test_an_end_that_is_as_good_as_certain_convicts_nobody() -> None:
    sums = end_sums(with_ends(np.array([0.01, 1.0])), ended=True, tau=0.0)
    assert sums.max() < 1.0


@pytest.mark.parametrize("rule", RULES[:2], ids=str)
def test_jax_and_torch_say_the_same(rule: Truncation | None) -> None:
    jnp, torch = pytest.importorskip("jax.numpy"), pytest.importorskip("torch")
    scaled = logits(60)
    tokens = drawn(kept_probabilities(scaled, None), np.random.default_rng(4))
    expected = described(scaled, tokens, rule)
    ids = np.arange(VOCABULARY)[None]
    masks = ids == tokens[:, None], ids == END
    in_jax = describe(jnp, jnp.asarray(scaled), *map(jnp.asarray, masks), rule)
    in_torch = describe(torch, torch.from_numpy(scaled), *map(torch.from_numpy, masks), rule)
    for name, values in expected._asdict().items():
        for found in (getattr(in_jax, name), getattr(in_torch, name)):
            np.testing.assert_allclose(np.asarray(found), values, atol=1e-5, err_msg=name)
