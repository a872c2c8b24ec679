"""Forgers who know the model's statistics and not the activations (`verify.toploc.statistics`)."""

from __future__ import annotations

from math import comb

import ml_dtypes
import numpy as np
import pytest

from benchmarks.null.forgeries import (
    Library,
    TokenTable,
    cells,
    channels,
    constant,
    ordered,
    selected,
)
from tests.verify.small_model import HIDDEN, VOCAB, SmallModel, bf16_bits
from verify.checks.prefill import judge_proofs, nearest_to_failing
from verify.formats.verdict import CheckResult
from verify.thresholds import BFLOAT16, FLOAT32, Limits
from verify.toploc.codec import Proof, build_proofs, build_proofs_batch, parse_proof
from verify.toploc.field import PRIME
from verify.toploc.statistics import (
    ChunkStatistics,
    bits_against_guessing,
    verify_proofs,
    verify_proofs_batch,
)

WIDTH, CHUNKS, KNOWN = 128, 200, 300
MODEL = SmallModel.random(seed=3)


def states(count: int, seed: int, *, rows: int = 32, outliers: int = 6) -> np.ndarray:
    """u16 [count, rows, 128]: some channels are large, of one sign, and vary by a tenth."""
    rng = np.random.default_rng(seed)
    values = rng.normal(size=(count, rows, WIDTH)).astype(np.float32)
    large = 8 + 8 * np.arange(outliers) / 6
    values[..., :outliers] = large * (1 + 0.1 * rng.normal(size=(count, rows, outliers)))
    return values.astype(ml_dtypes.bfloat16).view(np.uint16)


@pytest.fixture(scope="module")
def library() -> Library:
    tokens = np.random.default_rng(5).integers(0, 250, (KNOWN, 34)).astype(np.int32)
    return Library(states(KNOWN, seed=1), tokens)


@pytest.fixture(scope="module")
def forgeries(library: Library) -> dict[str, bytes]:
    found = selected(library.hidden)
    return {
        "constant": constant(found, 64),
        "channels": channels(found, WIDTH, 64),
        "cells": cells(found, 8),
        "token table": TokenTable(library).proofs(library.tokens[:1])[0],
        "replay": build_proofs(library.hidden[0])[0],
    }


def model_chunks(model: SmallModel, count: int, seed: int) -> Library:
    """The small model's final hidden states over random tokens, [count, 32, 64]."""
    tokens = np.random.default_rng(seed).integers(1, VOCAB, (count, 34)).astype(np.int32)
    hidden = []
    state = np.stack([model.read(row[:2].tolist()) for row in tokens])
    for column in tokens[:, 2:].T:
        moved = np.tanh(model.embed[column] + state @ model.mix).astype(model.dtype)
        state = moved.astype(np.float32)
        norm = np.sqrt(np.mean(state**2, axis=1, keepdims=True))
        hidden.append((state / norm).astype(model.dtype).astype(np.float32))
    return Library(bf16_bits(np.stack(hidden, axis=1)), tokens)


def judge(found: list[ChunkStatistics], limits: Limits) -> CheckResult:
    return nearest_to_failing(judge_proofs(found, limits))


def statistics(hidden: np.ndarray, proof: bytes) -> list[ChunkStatistics]:
    """Of chunks, each with that proof."""
    found = verify_proofs_batch(list(hidden), [[proof]] * len(hidden))
    return [each for one in found if isinstance(one, list) for each in one]


def verdicts(hidden: np.ndarray, proof: bytes, limits: Limits) -> list[CheckResult]:
    return [judge([each], limits) for each in statistics(hidden, proof)]


class TestForgedProof:
    """The best precomputed forgeries that we could devise: of channels, cells, tables of tokens."""

    @pytest.mark.parametrize("limits", [FLOAT32, BFLOAT16], ids=["float32", "bfloat16"])
    @pytest.mark.parametrize("name", ["constant", "channels", "cells", "token table", "replay"])
    def test_no_forgery_passes(
        self, forgeries: dict[str, bytes], name: str, limits: Limits
    ) -> None:
        hidden = states(CHUNKS, seed=2)
        assert not any(each.passed for each in verdicts(hidden, forgeries[name], limits))

    def test_honest_proofs_of_such_activations_pass_and_are_worth_something(self) -> None:
        hidden = states(CHUNKS, seed=2)
        for true, proofs in zip(hidden, build_proofs_batch(list(hidden)), strict=True):
            verdict = judge(verify_proofs(true, proofs), FLOAT32)
            assert verdict.passed and "too predictable" not in verdict.reason

    def test_a_models_states_cannot_be_forged_and_those_of_a_bf16_engine_pass(self) -> None:
        # given a real model, whose next state follows from the last token to a large part
        known, real = model_chunks(MODEL, 400, seed=1), model_chunks(MODEL, 150, seed=2)
        found, table = selected(known.hidden), TokenTable(known)

        # when forgers use what they know of it, and of the tokens
        made = [
            *(constant(found, 64), channels(found, HIDDEN, 64), channels(found, HIDDEN, 8)),
            *(cells(found, 64), cells(found, 8)),
        ]
        passed = [v.passed for proof in made for v in verdicts(real.hidden, proof, BFLOAT16)]
        # (three tokens nearly give this model's state: within the limits of bf16 it comes close)
        by_table = [
            judge(statistics(hidden[None], proof), FLOAT32).passed
            for hidden, proof in zip(real.hidden, table.proofs(real.tokens), strict=True)
        ]

        # then none passes, and an honest engine that rounds to bf16 does
        assert not any(passed) and not any(by_table)
        rounded = model_chunks(MODEL.in_bfloat16(), 150, seed=2).hidden
        for true, [proof] in zip(real.hidden, build_proofs_batch(list(rounded)), strict=True):
            verdict = judge(verify_proofs(true, [proof]), BFLOAT16)
            assert verdict.passed and "too predictable" not in verdict.reason


class TestRulesOfProofs:
    """Each rule that a forgery meets, alone."""

    def test_a_modulus_that_gives_channels_a_value_is_no_honest_one(self) -> None:
        # given a forger with the right value of every channel: all 32 rows are alike
        hidden = np.repeat(states(1, seed=3)[0][:1], 32, axis=0)
        proof = channels(selected(hidden[None]), WIDTH, 8)

        # then each claim is right, and the modulus gives it away
        found = verify_proofs(hidden, [proof])[0]
        assert found.error_median == 0 and parse_proof(proof).modulus == WIDTH
        verdict = judge([found], BFLOAT16)
        assert not verdict.passed and "honest modulus" in verdict.reason
        assert verdict.value == PRIME - WIDTH

    @pytest.mark.parametrize("width", [4096, 5120])
    def test_honest_moduli_of_wide_chunks_differ_by_little(self, width: int) -> None:
        # given chunks of more than 65,497 elements, where other positions may be selected
        rng = np.random.default_rng(9)
        values = rng.normal(size=(8, 32, width)).astype(np.float32)
        values[..., 100:500:37] *= 3  # outlier channels, at distances near those at which rows wrap
        noisy = values * (1 + 0.01 * rng.normal(size=values.shape).astype(np.float32))
        true, sent = bf16_bits(values), bf16_bits(noisy)

        # then proofs of one pass with the other, by the most lenient test
        for hidden, proofs in zip(true, build_proofs_batch(list(sent)), strict=True):
            found = verify_proofs(hidden, proofs)
            assert found[0].modulus_gap <= 4 and found[0].missing_terms == 0
            assert judge(found, BFLOAT16).passed

    @pytest.mark.parametrize("degree", [0, 1, 60, 123])
    def test_a_polynomial_of_too_low_a_degree_is_of_no_activations(self, degree: int) -> None:
        hidden = states(1, seed=3)[0]
        honest = parse_proof(build_proofs(hidden)[0])
        low = np.where(np.arange(128) <= degree, np.maximum(honest.coefficients, 1), 0)
        found = verify_proofs(hidden, [Proof(PRIME, low).to_bytes()])[0]
        assert found.missing_terms == 127 - degree
        assert not judge([found], BFLOAT16).passed


class TestBoundOfGuesses:
    """What no forger of whole channels exceeds."""

    @pytest.mark.parametrize("rows", [2, 5, 32])
    @pytest.mark.parametrize("outliers", [0, 6])
    def test_whole_channels_never_hit_more_than_was_said(self, rows: int, outliers: int) -> None:
        # given what a value for each of the channels granted hits, chosen on the very activations
        hidden = states(40, seed=7, rows=rows, outliers=outliers)
        selection = selected(hidden)
        found = verify_proofs_batch(list(hidden), build_proofs_batch(list(hidden)))
        values, column = ordered(selection.bits), selection.indices % WIDTH
        granted = -(-256 // rows)
        for chunk, one in enumerate(found):
            assert isinstance(one, list)
            hits = []
            for channel in range(WIDTH):
                there = values[chunk][column[chunk] == channel]
                best = max((np.sum((there >= v) & (there <= v + 16)) for v in there), default=0)
                hits.append(int(best))
            assert one[0].guessable[0] == sum(sorted(hits)[-granted:])

    @pytest.mark.parametrize("hits, required", [(10, 90), (64, 104), (0, 1), (90, 90), (128, 120)])
    def test_the_bits_bound_the_exact_binomial_tail(self, hits: int, required: int) -> None:
        rate = hits / 128
        tail = sum(comb(128, i) * rate**i * (1 - rate) ** (128 - i) for i in range(required, 129))
        assert tail <= 2.0 ** -bits_against_guessing(128, hits, required) + 1e-300
