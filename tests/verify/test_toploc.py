"""The TOPLOC codec against the published package, and against noise, ties and odd shapes.

`python -m tests.verify.test_toploc` records vectors/toploc.json, where `toploc` 0.1.6 is installed.
"""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.verify.small_model import bf16_bits
from verify.checks.prefill import judge_proofs
from verify.thresholds import BFLOAT16
from verify.toploc import (
    MAGNITUDE,
    PRIME,
    PROOF_BYTES,
    TOP_K,
    MalformedProof,
    build_proofs,
    canonical,
    evaluate,
    interpolate,
    parse_proof,
)
from verify.toploc.statistics import verify_proofs, verify_proofs_batch

# --- the package's bytes ------------------------------------------------------------------------

PATH = Path(__file__).parent / "vectors" / "toploc.json"
CASES = [
    {"name": "hidden 64, whole chunk", "rows": 32, "hidden": 64, "seed": 1},
    {"name": "hidden 64, 5 rows", "rows": 5, "hidden": 64, "seed": 2},
    {"name": "hidden 256, whole chunk", "rows": 32, "hidden": 256, "seed": 3},
    {"name": "k is every element", "rows": 2, "hidden": 64, "seed": 4},
    {"name": "two positions 65497 apart", "rows": 32, "hidden": 4096, "seed": 5, "collide": True},
    {"name": "the three largest moduli collide", "rows": 32, "hidden": 5120, "seed": 6}
    | {"collide": True, "moduli": 3},
]
VECTORS = json.loads(PATH.read_text())


def activations(case: dict[str, Any]) -> np.ndarray:
    """u16 [rows, hidden] of distinct large magnitudes, so that no tie is at the kth."""
    size = case["rows"] * case["hidden"]
    index = np.arange(size, dtype=np.int64)
    bits = 0x2000 + (index * 40503 + case["seed"]) % 4096  # the many small ones
    spread = (np.arange(600) * 7919 + case["seed"] * 31) % size
    large = np.unique(spread)[: min(512, size)]
    if case.get("collide"):
        extra = [large[100 + j] + 65497 - j for j in range(case.get("moduli", 1))]
        large = np.unique(np.append(large, extra))
        order = np.argsort((large * 48271) % 65521, kind="stable")
        first = np.isin(large[order], [*extra, *(e - 65497 + j for j, e in enumerate(extra))])
        order = np.concatenate([order[first], order[~first]])  # those that collide rank first
    else:
        order = np.argsort((large * 48271) % 65521, kind="stable")
    bits[large[order]] = 0x4300 - 3 * np.arange(large.size)
    sign = (index * index >> 3 & 1) << 15
    return (bits | sign).astype(np.uint16).reshape(case["rows"], case["hidden"])


def perturbed(bits: np.ndarray) -> np.ndarray:
    """The same, off by up to one unit in the last place (ranks stay) with some exponents wrong."""
    index = np.arange(bits.size, dtype=np.int64).reshape(bits.shape)
    moved = bits.astype(np.int64) + (index * 31 % 3) - 1
    return np.where(index % 11 == 0, moved + 0x80, moved).astype(np.uint16)


def untied(bits: np.ndarray) -> bool:
    """Whether the choice of the k largest leaves nothing open."""
    ordered = np.sort(bits.reshape(-1) & MAGNITUDE)[::-1]
    return ordered.size <= TOP_K or bool(ordered[TOP_K - 1] > ordered[TOP_K])


def record() -> list[dict[str, Any]]:
    import torch
    from toploc import build_proofs_bytes, verify_proofs_bytes

    vectors = []
    for case in CASES:
        bits = activations(case)
        rows = [torch.from_numpy(row.copy()).view(torch.bfloat16)[None] for row in bits]
        others = [torch.from_numpy(r.copy()).view(torch.bfloat16)[None] for r in perturbed(bits)]
        proof = build_proofs_bytes(rows, 32, TOP_K, True)[0]
        found = verify_proofs_bytes(torch.cat(others), [proof], 32, TOP_K, True)[0]
        vectors.append(
            {
                **case,
                "proof": base64.b64encode(proof).decode(),
                "exponent_mismatches": found.exp_mismatches,
                "mantissa_error_mean": found.mant_err_mean,
                "mantissa_error_median": found.mant_err_median,
            }
        )
    return vectors


@pytest.mark.parametrize("vector", VECTORS, ids=[v["name"] for v in VECTORS])
def test_proofs_are_the_published_packages_bytes(vector: dict[str, Any]) -> None:
    """And so are the statistics of activations that differ from those that were proved."""
    bits, proof = activations(vector), base64.b64decode(vector["proof"])
    assert untied(bits) and untied(perturbed(bits))
    assert build_proofs(bits) == [proof]
    (found,) = verify_proofs(perturbed(bits), [proof])
    assert found.exponent_mismatches == vector["exponent_mismatches"]
    assert found.mantissa_error_mean == pytest.approx(vector["mantissa_error_mean"], abs=1e-12)
    assert found.mantissa_error_median == vector["mantissa_error_median"]


# --- polynomials --------------------------------------------------------------------------------


@given(st.integers(0, 2**32 - 1), st.integers(1, 128))
@settings(max_examples=20, derandomize=True)
def test_interpolation_goes_through_its_points(seed: int, count: int) -> None:
    rng = np.random.default_rng(seed)
    points, values = rng.permutation(PRIME)[None, :128], rng.integers(0, PRIME, (1, 128))
    used = (np.arange(128) < count)[None]
    (row,) = coefficients = canonical(interpolate(points, values, used))
    assert not row[count:].any()
    assert (canonical(evaluate(coefficients.astype(float), points)) == values)[used].all()
    # and so by Python's integers
    at = int(points[0, 0])
    assert sum(int(c) * pow(at, j, PRIME) for j, c in enumerate(row)) % PRIME == values[0, 0]


# --- what honest rollouts show ------------------------------------------------------------------


def words(*values: int) -> bytes:
    return np.array(values, ">u2").tobytes()


def hidden_states(rows: int, hidden: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(rows, hidden)).astype(np.float32)


@pytest.mark.parametrize("rows, chunks", [(1, 1), (32, 1), (33, 2)])
@pytest.mark.parametrize("hidden", [1, 3, 300])
def test_a_proof_of_the_same_activations_has_no_error(rows: int, chunks: int, hidden: int) -> None:
    bits = bf16_bits(hidden_states(rows, hidden))
    proofs = build_proofs(bits)
    assert [len(proof) for proof in proofs] == [PROOF_BYTES] * chunks
    for start, found in zip(range(0, rows, 32), verify_proofs(bits, proofs), strict=True):
        assert found.elements == min(32, rows - start) * hidden
        assert found.k == min(128, found.elements)
        assert (found.exponent_mismatches, found.sign_mismatches, found.error_median) == (0, 0, 0.0)
        assert (found.mantissa_error_mean, found.mantissa_error_median) == (0.0, 0.0)


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


@pytest.mark.parametrize("hidden", [64, 1024])
def test_bf16_noise_is_told_from_other_activations(hidden: int) -> None:
    true = hidden_states(96, hidden)
    noisy = true + np.float32(0.01) * hidden_states(96, hidden, seed=1)
    proofs = build_proofs(bf16_bits(noisy))
    # arXiv 2501.16007: 38 of 128 positions, mantissa errors of 10 in the mean, 8 in the median
    limits = (BFLOAT16.mismatch_share, BFLOAT16.mantissa_mean, BFLOAT16.mantissa_median)
    assert limits == (38 / 128, 10.0, 8.0)
    for seed, passes in ((0, True), (9, False)):
        for found in verify_proofs(bf16_bits(hidden_states(96, hidden, seed)), proofs):
            errors = (found.mantissa_error_mean, found.mantissa_error_median)
            shares = (found.exponent_mismatches / found.k, *errors)
            assert all(a <= b for a, b in zip(shares, limits, strict=True)) == passes
            assert not passes or found.error_median < 0.5 * found.constant_error


@pytest.mark.parametrize("hidden", [64, 1024, 5120])
def test_no_constant_comes_below_the_constant_error(hidden: int) -> None:
    """The published limits alone let a constant pass at large hidden sizes (docs/verify.md)."""
    bits = bf16_bits(np.abs(hidden_states(32, hidden)))
    ordered = np.sort(bits.reshape(-1))[-128:]
    for constant in ordered[::8]:  # the best guesses there are: the values themselves
        (found,) = verify_proofs(bits, [words(PRIME, constant, *[0] * 127)])
        assert found.error_median >= found.constant_error > 0


def test_one_token_repeated_without_end_is_honest() -> None:
    # given 32 states that are alike, whose largest values lie within three units in the last
    # place, and the same a unit off here and there, as rounding does
    rng = np.random.default_rng(0)
    row = rng.integers(0x3E00, 0x3F00, 128).astype(np.uint16)
    row[:4] = np.arange(0x4080, 0x4084)
    states = np.tile(row, (32, 1))
    rounded = states + rng.integers(-1, 2, states.shape).astype(np.uint16)
    # then a constant fits as well, and honest proofs pass
    found = verify_proofs(rounded, build_proofs(states))
    assert found[0].error_median > BFLOAT16.constant_ratio * found[0].constant_error
    assert all(result.passed for result in judge_proofs(found, BFLOAT16))
    # and a constant's proof does not, for its polynomial
    forged = verify_proofs(rounded, [words(PRIME, int(row.max()), *[0] * 127)])
    failed = [result.reason for result in judge_proofs(forged, BFLOAT16) if not result.passed]
    assert any("missing leading terms" in reason for reason in failed)


# --- hostile bytes ------------------------------------------------------------------------------


SHORT, WHOLE, TWO = (bf16_bits(hidden_states(rows, 64)) for rows in (1, 32, 64))


@pytest.mark.parametrize(
    ("bits", "proofs", "reason"),
    [
        (WHOLE, [b""], "0 bytes"),
        (WHOLE, [words(0, *[0] * 128)], "modulus 0"),
        (WHOLE, [words(PRIME, *[0] * 128)[:-1]], "257 bytes"),
        (WHOLE, [words(PRIME, *[0] * 129)], "260 bytes"),
        (WHOLE, [words(127, *[0] * 128)], "modulus 127"),
        (WHOLE, [words(PRIME + 1, *[0] * 128)], "modulus 65498"),
        (WHOLE, [words(PRIME, *[0] * 127, PRIME)], "coefficient 65497"),
        (SHORT, [words(PRIME, *[1] * 128)], "beyond the 64"),
        (TWO, build_proofs(TWO)[:1], "1 proofs for 2 chunks"),
        (TWO, build_proofs(TWO) + build_proofs(WHOLE), "3 proofs for 2 chunks"),
    ],
)
def test_malformed_proofs_are_refused_with_the_reason_and_cost_no_others_their_result(
    bits: np.ndarray, proofs: list[bytes], reason: str
) -> None:
    good = build_proofs(bits)
    first, bad, last = verify_proofs_batch([bits] * 3, [good, proofs, good])
    assert isinstance(bad, MalformedProof) and reason in str(bad)
    assert first == last == verify_proofs(bits, good)


if __name__ == "__main__":
    PATH.write_text(json.dumps(record(), indent=1) + "\n")
