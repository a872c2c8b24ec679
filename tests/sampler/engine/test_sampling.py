"""What the engine samples, and what it says of it, against transformers and numpy."""

from __future__ import annotations

import threading

import ml_dtypes
import numpy as np
import pytest

from sampler.engine.requests import GenerationAborted
from tests.sampler.engine.models import END_TOKEN, HIDDEN, MAX_NEW_TOKENS, VOCABULARY, Reference
from tests.sampler.engine.requests import batch
from verify.noise import gumbel

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("seeded", [True, False])
def test_logprobs_are_those_of_transformers_at_the_temperature(engine, untied, temperature, seeded):
    requests = batch(temperature=temperature, seeded=seeded)
    reference = Reference(untied)

    sampled = engine.generate(requests)

    differences = []
    for request, result in zip(requests, sampled, strict=True):
        expected, _ = reference.logprobs(
            list(request.prompt_tokens), result.output_tokens.tolist(), temperature
        )
        differences.append(np.abs(result.logprobs - expected))
    assert np.concatenate(differences).mean() < 1e-5
    assert np.concatenate(differences).max() < 1e-3


def test_hidden_states_of_every_output_token_are_those_of_transformers(engine, untied):
    requests = batch()
    reference = Reference(untied)

    sampled = engine.generate(requests)

    distances = []
    for request, result in zip(requests, sampled, strict=True):
        tokens = result.output_tokens.tolist()
        _, hidden = reference.logprobs(list(request.prompt_tokens), tokens)
        assert result.hidden.shape == (len(tokens), HIDDEN)
        distances.append(steps_apart(result.hidden, hidden))
    distance = np.concatenate(distances)
    assert distance.max() <= 1
    assert (distance > 0).mean() < 1e-3


def test_tokens_are_the_argmax_of_logits_plus_public_noise(engine, untied):
    requests = batch(temperature=0.6)
    reference = Reference(untied)

    sampled = engine.generate(requests)

    for request, result in zip(requests, sampled, strict=True):
        tokens = result.output_tokens
        _, logits = reference.forward(list(request.prompt_tokens), tokens.tolist())
        key_0, key_1 = (np.int32(word) for word in request.noise_key)
        position = np.arange(len(tokens), dtype=np.int32)[:, None]
        with np.errstate(over="ignore"):  # hashing wraps
            noise = gumbel(np, key_0, key_1, position, np.arange(VOCABULARY, dtype=np.int32))
        noisy = logits / 0.6 + noise
        gap = noisy.max(axis=-1) - noisy[np.arange(len(tokens)), tokens]
        assert gap.max() < 1e-3


def test_a_batch_repeats_bit_for_bit_and_in_any_order(engine):
    requests = batch()
    order = np.random.default_rng(0).permutation(len(requests))

    first = engine.generate(requests)
    again = engine.generate(requests)
    shuffled = engine.generate([requests[i] for i in order])

    for one, two in zip(first, again, strict=True):
        assert one.output_tokens.tolist() == two.output_tokens.tolist()
        assert np.array_equal(one.logprobs, two.logprobs)
        assert np.array_equal(one.hidden, two.hidden)
    for place, index in enumerate(order):
        assert shuffled[place].output_tokens.tolist() == first[index].output_tokens.tolist()


def test_unseeded_sampling_draws_anew(engine):
    requests = batch(seeded=False)

    first, second = engine.generate(requests), engine.generate(requests)

    assert any(
        one.output_tokens.tolist() != two.output_tokens.tolist()
        for one, two in zip(first, second, strict=True)
    )


def test_frequencies_are_those_of_the_softmax(engine, untied):
    """2048 first tokens of one prompt: chi-square of a handful of bins around the expected."""
    request = batch(1, 1)[0]
    _, logits = Reference(untied).forward(list(request.prompt_tokens), [2])
    expected = np.exp(logits[0] - logits[0].max())
    expected /= expected.sum()
    likely = np.argsort(expected)[-8:]
    requests = [
        type(request)(request.prompt_tokens, 1, END_TOKEN, 1.0, (index, -index))
        for index in range(2048)
    ]

    tokens = np.concatenate([s.output_tokens for s in engine.generate(requests)])

    counts = np.array([(tokens == token).sum() for token in likely])
    deviations = (counts - 2048 * expected[likely]) / np.sqrt(2048 * expected[likely])
    assert np.abs(deviations).max() < 4.5


def test_a_sequence_ends_with_its_end_token_or_at_its_length(engine):
    sampled = engine.generate(batch(8, 8))

    assert {result.finish_reason for result in sampled} == {"stop", "length"}
    for result in sampled:
        tokens = result.output_tokens.tolist()
        assert END_TOKEN not in tokens[:-1]
        if result.finish_reason == "stop":
            assert tokens[-1] == END_TOKEN
        else:
            assert len(tokens) == MAX_NEW_TOKENS


def test_an_abort_leaves_nothing_behind(engine):
    requests = batch()
    expected = engine.generate(requests)
    stop = threading.Event()
    stop.set()

    with pytest.raises(GenerationAborted):
        engine.generate(requests, stop=stop)

    again = engine.generate(requests)
    assert [r.output_tokens.tolist() for r in again] == [r.output_tokens.tolist() for r in expected]


def test_chunked_prefill_and_preemption_change_no_row(engine, untied, new_engine):
    """A cache of 14 blocks for 16 sequences of 3: some must be preempted and prefilled again."""
    requests = batch()
    expected = engine.generate(requests)
    block_bytes = 2 * 3 * 32 * 32 * 4  # keys and values, layers, tokens, head, float32
    cramped = new_engine(
        kv_cache_memory_bytes=14 * block_bytes,
        max_num_batched_tokens=48,
        max_num_seqs=16,
        disable_log_stats=False,
    )
    cramped.load(untied, 0)

    sampled = cramped.generate(requests)

    for result, same in zip(sampled, expected, strict=True):
        assert result.output_tokens.tolist() == same.output_tokens.tolist()
        np.testing.assert_allclose(result.logprobs, same.logprobs, atol=1e-4)
        distance = bits_apart(result.hidden, same.hidden)
        assert distance.max() <= 1
        assert (distance > 0).mean() < 1e-3


def test_bfloat16_engine_agrees_with_float32_on_the_same_bits(rounded, new_engine):
    engine = new_engine("bfloat16")
    engine.load(rounded, 0)
    requests = batch(8, 4)
    reference = Reference(rounded)

    sampled = engine.generate(requests)

    differences, hidden_error, hidden_size = [], 0.0, 0.0
    for request, result in zip(requests, sampled, strict=True):
        tokens = result.output_tokens.tolist()
        expected, hidden = reference.logprobs(list(request.prompt_tokens), tokens)
        differences.append(np.abs(result.logprobs - expected))
        captured = result.hidden.view(ml_dtypes.bfloat16).astype(np.float32)
        hidden_error += np.square(captured - hidden).sum()
        hidden_size += np.square(hidden).sum()
    assert np.concatenate(differences).mean() < 0.02
    assert np.sqrt(hidden_error / hidden_size) < 0.02


def steps_apart(bits: np.ndarray, reference: np.ndarray) -> np.ndarray:
    """Units in the last place of bf16 between captured bits and a float32 reference."""
    return bits_apart(bits, reference.astype(ml_dtypes.bfloat16).view(np.uint16))


def bits_apart(one: np.ndarray, two: np.ndarray) -> np.ndarray:
    return np.abs(ordered(one) - ordered(two))


def ordered(bits: np.ndarray) -> np.ndarray:
    """Bits of floats as integers in the order of the floats: neighbours differ by 1."""
    signed = bits.astype(np.int32)
    return np.where(signed & 0x8000, 0x8000 - signed, signed)
