"""The TOPLOC codec against the published package, and against noise, ties and odd shapes."""

from __future__ import annotations

import base64
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.verify.record_toploc_vectors import PATH, activations, perturbed, untied
from tests.verify.small_model import bf16_bits
from verify.thresholds import BFLOAT16
from verify.toploc.codec import PROOF_BYTES, MalformedProof, build_proofs, parse_proof
from verify.toploc.field import PRIME, canonical, evaluate, interpolate
from verify.toploc.statistics import ChunkStatistics, verify_proofs, verify_proofs_batch

VECTORS = json.loads(PATH.read_text())


def hidden_states(rows: int, hidden: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(rows, hidden)).astype(np.float32)


def noisy(hidden: np.ndarray, relative: float, seed: int = 1) -> np.ndarray:
    """With absolute noise of that share of a row's rms, as rounding inside an engine makes it."""
    noise = np.random.default_rng(seed).normal(size=hidden.shape).astype(np.float32)
    return hidden + relative * noise


def power_sum(coefficients: np.ndarray, point: int) -> int:
    """The polynomial's value by Python integers."""
    return sum(int(c) * pow(point, j, PRIME) for j, c in enumerate(coefficients)) % PRIME


# --- the package's bytes ------------------------------------------------------------------------


@pytest.mark.parametrize("vector", VECTORS, ids=[v["name"] for v in VECTORS])
def test_proofs_are_the_published_packages_bytes(vector: dict) -> None:
    bits = activations(vector)
    assert untied(bits)

    assert build_proofs(bits) == [base64.b64decode(vector["proof"])]


@pytest.mark.parametrize("vector", VECTORS, ids=[v["name"] for v in VECTORS])
def test_statistics_are_the_published_packages(vector: dict) -> None:
    bits = perturbed(activations(vector))
    assert untied(bits)

    found = verify_proofs(bits, [base64.b64decode(vector["proof"])])[0]

    assert found.exponent_mismatches == vector["exponent_mismatches"]
    assert found.mantissa_error_mean == pytest.approx(vector["mantissa_error_mean"], abs=1e-12)
    assert found.mantissa_error_median == vector["mantissa_error_median"]


@pytest.mark.parametrize("hidden", [64, 1024, 4096])
def test_each_verifies_what_the_other_built(hidden: int) -> None:
    package = pytest.importorskip("toploc", reason="the published package is not installed")
    torch = pytest.importorskip("torch")
    bits = bf16_bits(hidden_states(32, hidden))
    tensor = torch.from_numpy(bits).view(torch.bfloat16)

    theirs = package.build_proofs_bytes(list(tensor[:, None]), 32, 128, True)
    of_theirs = verify_proofs(bits, theirs)[0]
    of_ours = package.verify_proofs_bytes(tensor, build_proofs(bits), 32, 128, True)[0]

    # Up to 4 positions differ between frameworks, which break ties at the kth in their own way.
    assert of_theirs.exponent_mismatches <= 4 and of_theirs.mantissa_error_median == 0
    assert of_ours.exp_mismatches <= 4 and of_ours.mant_err_median == 0


# --- the polynomials ----------------------------------------------------------------------------


@given(st.integers(0, 2**32 - 1), st.integers(1, 128))
@settings(max_examples=30, deadline=None)
def test_interpolation_goes_through_its_points(seed: int, count: int) -> None:
    rng = np.random.default_rng(seed)
    points = rng.permutation(PRIME)[None, :128]
    values = rng.integers(0, PRIME, (1, 128))
    used = (np.arange(128) < count)[None]

    coefficients = canonical(interpolate(points, values, used))

    assert not coefficients[0, count:].any()
    found = canonical(evaluate(coefficients.astype(float), points))
    assert (found == values)[used].all()
    assert power_sum(coefficients[0], int(points[0, 0])) == values[0, 0]


# --- what honest rollouts show ------------------------------------------------------------------


@pytest.mark.parametrize("rows, chunks", [(1, 1), (31, 1), (32, 1), (33, 2), (70, 3)])
@pytest.mark.parametrize("hidden", [1, 3, 64, 300])
def test_a_proof_of_the_same_activations_has_no_error(rows: int, chunks: int, hidden: int) -> None:
    bits = bf16_bits(hidden_states(rows, hidden))

    proofs = build_proofs(bits)
    found = verify_proofs(bits, proofs)

    assert [len(p) for p in proofs] == [PROOF_BYTES] * chunks
    assert sum(s.k for s in found) == sum(
        min(128, min(32, rows - i) * hidden) for i in range(0, rows, 32)
    )
    for s in found:
        assert (s.exponent_mismatches, s.sign_mismatches, s.error_median) == (0, 0, 0.0)
        assert (s.mantissa_error_mean, s.mantissa_error_median) == (0.0, 0.0)


def test_equal_magnitudes_are_taken_in_order_of_position() -> None:
    bits = np.full((32, 64), 0x3F80, np.uint16)  # 2048 times 1.0
    bits[0, 0] = 0xBF80  # -1.0 is as large

    proof = parse_proof(build_proofs(bits)[0])

    values = canonical(evaluate(proof.coefficients[None].astype(float), np.arange(128)[None]))
    assert values.tolist() == [[0xBF80] + [0x3F80] * 127]


def test_activations_that_are_not_finite_are_not_proved() -> None:
    bits = bf16_bits(hidden_states(4, 64))
    bits[2, 5] = 0x7FC0  # NaN
    with pytest.raises(ValueError, match="not finite"):
        build_proofs(bits)


def test_the_bfloat16_limits_are_the_published_ones() -> None:
    """arXiv 2501.16007: 38 of 128 positions, mantissa errors of 10 in the mean, 8 in the median."""
    shares = (BFLOAT16.mismatch_share, BFLOAT16.mantissa_mean, BFLOAT16.mantissa_median)
    assert shares == (38 / 128, 10.0, 8.0)


def published_limits_hold(s: ChunkStatistics) -> bool:
    return (
        s.exponent_mismatches <= 38 / 128 * s.k
        and s.mantissa_error_mean <= 10
        and s.mantissa_error_median <= 8
    )


@pytest.mark.parametrize("hidden", [64, 1024])
def test_bf16_noise_is_told_from_other_activations(hidden: int) -> None:
    true = hidden_states(96, hidden)
    proofs = build_proofs(bf16_bits(noisy(true, 0.01)))

    honest = verify_proofs(bf16_bits(true), proofs)
    other = verify_proofs(bf16_bits(hidden_states(96, hidden, seed=9)), proofs)

    assert all(published_limits_hold(s) for s in honest)
    assert all(s.error_median < 0.5 * s.constant_error for s in honest)
    assert not any(published_limits_hold(s) for s in other)


@pytest.mark.parametrize("hidden", [64, 1024, 5120])
def test_no_constant_comes_below_the_constant_error(hidden: int) -> None:
    """The published limits alone let a constant pass at large hidden sizes (docs/verify.md)."""
    bits = bf16_bits(np.abs(hidden_states(32, hidden)))
    ordered = np.sort(bits.reshape(-1))[-128:]
    for constant in ordered[::8]:  # the best guesses there are: the values themselves
        proof = np.array([PRIME, constant] + [0] * 127, ">u2").tobytes()
        found = verify_proofs(bits, [proof])[0]
        assert found.error_median >= found.constant_error > 0


# --- hostile bytes ------------------------------------------------------------------------------


def words(*values: int) -> bytes:
    return np.array(values, ">u2").tobytes()


MALFORMED = {
    "empty": (b"", "0 bytes"),
    "null": (words(0, *[0] * 128), "modulus 0"),
    "one byte short": (words(PRIME, *[0] * 128)[:-1], "257 bytes"),
    "one coefficient more": (words(PRIME, *[0] * 129), "260 bytes"),
    "modulus below k": (words(127, *[0] * 128), "modulus 127"),
    "modulus above the prime": (words(PRIME + 1, *[0] * 128), "modulus 65498"),
    "coefficient at the prime": (words(PRIME, *[0] * 127, PRIME), "coefficient 65497"),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_proofs_are_refused_with_the_reason(name: str) -> None:
    data, reason = MALFORMED[name]
    with pytest.raises(MalformedProof, match=reason):
        parse_proof(data)
    with pytest.raises(MalformedProof, match=reason):
        verify_proofs(bf16_bits(hidden_states(32, 64)), [data])


def test_a_short_chunk_has_no_coefficients_to_spare() -> None:
    bits = bf16_bits(hidden_states(1, 64))
    with pytest.raises(MalformedProof, match="beyond the 64"):
        verify_proofs(bits, [words(PRIME, *[1] * 128)])


@pytest.mark.parametrize("count", [0, 1, 3])
def test_too_few_or_too_many_proofs_are_refused(count: int) -> None:
    bits = bf16_bits(hidden_states(64, 8))
    with pytest.raises(MalformedProof, match=f"{count} proofs for 2 chunks"):
        verify_proofs(bits, (build_proofs(bits) * 2)[:count])


def test_one_malformed_rollout_does_not_cost_the_others_their_result() -> None:
    bits = bf16_bits(hidden_states(8, 64))
    good = build_proofs(bits)
    first, bad, last = verify_proofs_batch([bits] * 3, [good, [b"junk"], good])
    assert isinstance(bad, MalformedProof)
    assert first == last == verify_proofs(bits, good)
