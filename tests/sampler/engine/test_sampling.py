"""What the engine samples, and what it says of it, against transformers and numpy."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

from sampler.engine.requests import Sampled, SampleRequest
from tests.sampler.engine.models import (
    END_TOKEN,
    MAX_NEW_TOKENS,
    VOCABULARY,
    Reference,
    batch,
    sample,
    tokens_of,
)
from verify.noise import gumbel
from verify.toploc import build_proofs_of
from verify.toploc.statistics import ChunkStatistics, verify_proofs
from verify.truncation import Truncation, kept_from

pytestmark = pytest.mark.slow

CUTS = {
    "whole": Truncation(),
    "top_k": Truncation(top_k=12),
    "top_p": Truncation(top_p=0.8),
    "both": Truncation(top_p=0.9, top_k=12),
}


def cut(requests: Iterable[SampleRequest], rule: Truncation) -> list[SampleRequest]:
    return [replace(request, top_p=rule.top_p, top_k=rule.top_k) for request in requests]


def kept(scaled: np.ndarray, rule: Truncation, *, more: float = 0.0) -> np.ndarray:
    """bool [n, V]: what the rule keeps, with a top_p that is larger by so much."""
    scaled = scaled.astype(np.float32)
    top_p = rule.top_p + more if rule.top_p < 1.0 else None
    top_k = rule.top_k if rule.top_k > 0 else None
    return scaled >= kept_from(np, scaled, top_p=top_p, top_k=top_k)


def clear(scaled: np.ndarray, rule: Truncation) -> np.ndarray:
    """bool [n]: rows at whose cut no two tokens are so close that rounding may exchange them."""
    most, least = kept(scaled, rule, more=1e-5), kept(scaled, rule, more=-1e-5)
    lowest = np.where(most, scaled, np.inf).min(-1, keepdims=True)
    return (least == (scaled >= lowest - 1e-4)).all(-1)


def log_softmax(scaled: np.ndarray) -> np.ndarray:
    top = scaled.max(axis=-1, keepdims=True)
    return scaled - top - np.log(np.exp(scaled - top).sum(axis=-1, keepdims=True))


def noise(request: SampleRequest, count: int) -> np.ndarray:
    """f32 [n, V]: the public noise of a seeded request."""
    key_0, key_1 = (np.int32(word) for word in request.noise_key)
    position = np.arange(count, dtype=np.int32)[:, None]
    with np.errstate(over="ignore"):  # hashing wraps
        return gumbel(np, key_0, key_1, position, np.arange(VOCABULARY, dtype=np.int32))


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("seeded", [True, False], ids=["seeded", "unseeded"])
@pytest.mark.parametrize("rule", CUTS.values(), ids=CUTS.keys())
def test_tokens_and_logprobs_are_of_the_scaled_and_truncated_softmax(
    engine, untied, temperature, seeded, rule
):
    """log_softmax(logits / T) after top-k, then top-p, before noise: transformers in float64. A
    seeded token is the argmax of these logits and the public noise."""
    requests = cut(batch(temperature=temperature, seeded=seeded), rule)
    reference = Reference(untied)

    sampled = sample(engine, requests)

    differences, sure = [], []
    for request, result in zip(requests, sampled, strict=True):
        tokens = result.output_tokens
        _, logits = reference.forward(list(request.prompt_tokens), tokens.tolist())
        scaled = logits.astype(np.float64) / temperature
        # One token more or less, where the cut lies within rounding of it.
        cuts = (np.where(kept(scaled, rule, more=m), scaled, -np.inf) for m in (1e-4, -1e-4, 0.0))
        rows, nearest = np.arange(len(tokens)), np.full(len(tokens), np.inf)
        for left in cuts:
            found = np.abs(result.logprobs - log_softmax(left)[rows, tokens])
            nearest = np.minimum(nearest, found)
        differences.append(nearest)
        sure.append(clear(scaled, rule))
        if seeded:
            noisy = left + noise(request, len(tokens))
            assert (noisy.max(axis=-1) - noisy[rows, tokens]).max() < 1e-3
    # Of two all but equal tokens the engine may keep the one and transformers the other.
    assert np.concatenate(sure).mean() > 0.95
    found = np.concatenate(differences)[np.concatenate(sure)]
    # No token is outside of what is kept (inf), and the sums are over the same tokens.
    assert found.mean() < 1e-5, np.sort(found)[-3:]
    assert found.max() < 1e-3


def statistics(
    reference: Reference, requests: Sequence[SampleRequest], sampled: Sequence[Sampled]
) -> list[ChunkStatistics]:
    """Of the engine's proofs against hidden states of transformers."""
    found = []
    proofs = build_proofs_of([each.selection for each in sampled])
    for request, result, proof in zip(requests, sampled, proofs, strict=True):
        tokens = result.output_tokens.tolist()
        hidden, _ = reference.forward(list(request.prompt_tokens), tokens)
        assert len(proof) == -(-len(tokens) // 32)
        bits = np.ascontiguousarray(hidden).astype(ml_dtypes.bfloat16).view(np.uint16)
        found += verify_proofs(bits, proof)
    return found


def assert_proven(found: Sequence[ChunkStatistics]) -> None:
    """Every chunk: right positions, signs and exponents, mantissas but for rounding to bf16, which
    may also exchange the 128th magnitude with the 129th."""
    for chunk in found:
        assert chunk.exponent_mismatches + chunk.sign_mismatches <= 2
        assert chunk.mantissa_error_mean <= 0.05
        assert chunk.error_median == 0


def test_proofs_speak_of_the_hidden_states_of_their_own_rollout(engine, untied):
    """Every output token's, the first included; outputs of one chunk and of two."""
    requests, reference = batch(8, 4), Reference(untied)
    sampled = sample(engine, requests)
    assert {-(-len(result.output_tokens) // 32) for result in sampled} == {1, 2}
    assert_proven(statistics(reference, requests, sampled))
    # and those of another rollout do not
    requests = [replace(request, max_new_tokens=20) for request in batch(2, 1)]
    one, two = sample(engine, requests)
    exchanged = [replace(one, selection=two.selection), replace(two, selection=one.selection)]
    found = statistics(reference, requests, exchanged)
    assert min(chunk.exponent_mismatches for chunk in found) > 8


def test_a_seeded_batch_repeats_bit_for_bit_and_in_any_order_an_unseeded_one_does_not(engine):
    requests = batch()
    order = np.random.default_rng(0).permutation(len(requests))

    first, again = sample(engine, requests), sample(engine, requests)
    shuffled = tokens_of(engine, [requests[i] for i in order])

    for one, two in zip(first, again, strict=True):
        assert one.output_tokens.tolist() == two.output_tokens.tolist()
        np.testing.assert_allclose(one.logprobs, two.logprobs, atol=1e-5)
    assert shuffled == [first[i].output_tokens.tolist() for i in order]
    unseeded = batch(seeded=False)
    assert tokens_of(engine, unseeded) != tokens_of(engine, unseeded)


def test_a_sequence_ends_with_its_end_token_or_at_its_length(engine):
    sampled = sample(engine, batch(8, 8))

    assert {result.finish_reason for result in sampled} == {"stop", "length"}
    for result in sampled:
        tokens = result.output_tokens.tolist()
        assert END_TOKEN not in tokens[:-1]
        if result.finish_reason == "stop":
            assert tokens[-1] == END_TOKEN
        else:
            assert len(tokens) == MAX_NEW_TOKENS


@pytest.mark.parametrize("again", [False, True], ids=["cold", "prefix cache"])
def test_chunks_preemption_and_cached_prefixes_change_no_row(engine, untied, cramped, again):
    requests = batch()
    expected = sample(engine, requests)
    if again:
        sample(cramped, requests)

    sampled = sample(cramped, requests)

    for result, same in zip(sampled, expected, strict=True):
        assert result.output_tokens.tolist() == same.output_tokens.tolist()
        np.testing.assert_allclose(result.logprobs, same.logprobs, atol=1e-4)
    assert_proven(statistics(Reference(untied), requests, sampled))
