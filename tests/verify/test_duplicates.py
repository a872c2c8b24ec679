"""Fingerprints: shared by copies, whole or in part, and by nothing that was sampled apart."""

from __future__ import annotations

import numpy as np
import pytest

from verify.checks.duplicates import OUTPUT_NATS, fingerprints
from verify.formats.verdict import MAX_FINGERPRINTS

VOCABULARY = 50


def sampled(n: int, seed: int, nats: float = 0.7) -> tuple[np.ndarray, np.ndarray]:
    """Tokens, and log-probs of about so much information each."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, VOCABULARY, n).astype(np.int32)
    return tokens, -rng.exponential(nats, n).astype(np.float32)


def shared(one: list[int], two: list[int]) -> int:
    return len(set(one) & set(two))


def test_a_copy_shares_everything_and_other_rollouts_nothing() -> None:
    prints = [fingerprints(*sampled(600, seed)) for seed in range(200)]
    assert all(len(p) == MAX_FINGERPRINTS for p in prints)
    everything = [p for row in prints for p in row]
    assert len(set(everything)) == len(everything)
    assert fingerprints(*sampled(600, 0)) == prints[0]


@pytest.mark.parametrize("edits", [1, 3])
def test_a_copy_with_a_few_other_tokens_still_shares_runs(edits: int) -> None:
    for seed in range(50):
        tokens, logprobs = sampled(1000, seed)
        copy = tokens.copy()
        places = np.random.default_rng(seed).integers(0, len(copy), edits)
        copy[places] = (copy[places] + 1) % VOCABULARY
        assert shared(fingerprints(tokens, logprobs), fingerprints(copy, logprobs)) > 0


def test_other_validators_rounding_hides_no_copy() -> None:
    for seed in range(50):
        tokens, logprobs = sampled(800, seed)
        noise = np.random.default_rng(seed).normal(0, 0.01, len(tokens)).astype(np.float32)
        assert shared(fingerprints(tokens, logprobs), fingerprints(tokens, logprobs + noise)) > 5


def test_what_carries_little_information_may_be_alike() -> None:
    tokens, logprobs = sampled(600, 1)
    little = logprobs * np.float32(OUTPUT_NATS / -logprobs.sum(dtype=np.float64) * 0.99)
    assert fingerprints(tokens, little) == []


def test_text_that_the_policy_writes_anyway_is_no_run() -> None:
    """Two rollouts that restate the problem, and then go on differently."""
    same, _ = sampled(500, 1)
    certain = np.full(500, -0.01, np.float32)
    prints = []
    for seed in (2, 3):
        tokens, logprobs = sampled(400, seed)
        prints.append(
            fingerprints(np.concatenate([same, tokens]), np.concatenate([certain, logprobs]))
        )
    assert shared(*prints) == 0
