"""The codec in JAX against that in numpy and the published package's recorded bytes."""

from __future__ import annotations

import base64
import json
import subprocess
import sys

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.verify.record_toploc_vectors import PATH, activations, perturbed
from tests.verify.small_model import bf16_bits
from verify.toploc import MalformedProof, codec, jax_codec, statistics
from verify.toploc.field import PRIME
from verify.toploc.selection import TOP_K, select

VECTORS = json.loads(PATH.read_text())


def hidden_bits(rows: int, hidden: int, seed: int = 0) -> np.ndarray:
    values = np.random.default_rng(seed).normal(size=(rows, hidden))
    return bf16_bits(values.astype(np.float32))


def tied(rows: int, hidden: int, seed: int = 0) -> np.ndarray:
    """Few magnitudes, zeros of both signs and subnormal ones among them."""
    few = np.array([0, 0x8000, 1, 0x8001, 2, 0x3F80, 0xBF80, 0x3F81], np.uint16)
    return np.random.default_rng(seed).choice(few, size=(rows, hidden))


# --- the same bytes -----------------------------------------------------------------------------


def same_as_numpy(rollouts: list[np.ndarray]) -> bool:
    """Bytes, and statistics of those proofs against other activations."""
    others = [bits ^ (hidden_bits(*bits.shape, seed=7) & np.uint16(0x8003)) for bits in rollouts]
    proofs = jax_codec.build_proofs_batch(rollouts)
    expected = statistics.verify_proofs_batch(others, proofs)
    return (
        proofs == codec.build_proofs_batch(rollouts)
        and jax_codec.verify_proofs_batch(others, proofs) == expected
        and any(chunk.error_median for rollout in expected for chunk in rollout)
    )


def test_proofs_are_the_published_packages_bytes() -> None:
    proofs = jax_codec.build_proofs_batch([activations(vector) for vector in VECTORS])
    assert proofs == [[base64.b64decode(vector["proof"])] for vector in VECTORS]


def test_statistics_are_the_published_packages() -> None:
    found = jax_codec.verify_proofs_batch(
        [perturbed(activations(vector)) for vector in VECTORS],
        [[base64.b64decode(vector["proof"])] for vector in VECTORS],
    )
    for (chunk,), vector in zip(found, VECTORS, strict=True):
        assert chunk.exponent_mismatches == vector["exponent_mismatches"]
        assert chunk.mantissa_error_mean == pytest.approx(vector["mantissa_error_mean"], abs=1e-12)
        assert chunk.mantissa_error_median == vector["mantissa_error_median"]


def test_small_hidden_sizes_short_chunks_and_ties_give_what_numpy_gives() -> None:
    assert same_as_numpy(
        [
            made(rows, hidden, seed=rows)
            for hidden in (1, 3, 8, 64, 300)  # of 1 and 3 a chunk has fewer than 128 elements
            for made, rows in ((hidden_bits, 1), (hidden_bits, 33), (hidden_bits, 0), (tied, 40))
        ]
    )


def test_large_hidden_sizes_give_what_numpy_gives() -> None:
    assert same_as_numpy([hidden_bits(33, 5120), hidden_bits(1, 5120), tied(40, 5120)])


@given(seed=st.integers(0, 2**32 - 1), size=st.integers(1, 512), few=st.booleans())
@settings(max_examples=60)
def test_the_largest_are_selected_in_the_order_of_numpy(seed: int, size: int, few: bool) -> None:
    made = tied if few else hidden_bits
    chunk = made(1, size, seed=seed).reshape(-1)
    expected = select([chunk])

    found = jax_codec.evaluate_at(
        *jax_codec.padded([chunk, np.zeros(512, np.uint16)]), np.ones((2, 129), np.uint16)
    )

    assert (np.asarray(found[0])[0] == expected.indices[0]).all()
    assert (np.asarray(found[1])[0] == expected.bits[0]).all()


def test_more_chunks_than_are_worked_on_at_once() -> None:
    bits = hidden_bits(32 * 65, 16)
    proofs = jax_codec.build_proofs(bits)
    assert len(proofs) == 65
    assert proofs == codec.build_proofs(bits)


def test_activations_that_lie_on_a_device_are_encoded_there() -> None:
    bits = hidden_bits(64, 64)
    on_device, sizes = jax.device_put(jax_codec.padded([bits[:32].ravel(), bits[32:].ravel()]))

    with jax.transfer_guard("disallow"):
        words, faults = jax_codec.encode(on_device, sizes)

    assert not np.asarray(faults).any()
    assert [w.astype(">u2").tobytes() for w in np.asarray(words)] == codec.build_proofs(bits)


def test_64_bit_types_change_nothing() -> None:
    bits = hidden_bits(40, 64)
    with jax.enable_x64(True):
        proofs = jax_codec.build_proofs(bits)
        found = jax_codec.verify_proofs(bits, proofs)
    assert proofs == codec.build_proofs(bits)
    assert found == statistics.verify_proofs(bits, proofs)


# --- what is refused ----------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", [0x7FC0, 0x7F80, 0xFF80], ids=["NaN", "inf", "-inf"])
def test_activations_that_are_not_finite_are_not_proved(wrong: int) -> None:
    bits = hidden_bits(40, 64)
    bits[37, 5] = wrong
    with pytest.raises(ValueError, match="not finite"):
        jax_codec.build_proofs(bits)


def test_one_malformed_rollout_does_not_cost_the_others_their_result() -> None:
    bits = hidden_bits(40, 64)
    good = codec.build_proofs(bits)
    null, constant = (
        np.array([modulus, 0x4000] + [0] * (TOP_K - 1), ">u2").tobytes() for modulus in (0, PRIME)
    )

    sent = [good, [b"junk"], [null] * 2, [constant] * 2]
    found = jax_codec.verify_proofs_batch([bits] * 4, sent)

    assert [isinstance(f, MalformedProof) for f in found] == [False, True, True, False]
    assert [found[0], found[3]] == statistics.verify_proofs_batch([bits] * 2, [good, sent[3]])
    with pytest.raises(MalformedProof, match="1 proofs for 2 chunks"):
        jax_codec.verify_proofs(bits, good[:1])


def test_a_chunk_beyond_the_limit_is_refused() -> None:
    wide = np.zeros((32, jax_codec.LARGEST_CHUNK // 32 + 1), np.uint16)
    with pytest.raises(ValueError, match="more than 16777216"):
        jax_codec.build_proofs(wide)


def test_the_package_imports_no_jax() -> None:
    code = "import sys, verify.toploc, verify.proof_commands; sys.exit('jax' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
