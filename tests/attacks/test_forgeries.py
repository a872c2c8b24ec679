"""Claims that are not so: proofs of other or of no activations, log-probs, rewards, numbers that no
honest row has, signatures. Tokens are those of an honest worker.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from math import comb
from typing import Any

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
from runspec.core.canonical import digest_bytes
from runspec.core.signed import BadSignature, sign_document
from tests.attacks.conftest import PRECISIONS, like, refused, rejection, take_lease
from tests.verify.bench import MODEL, Bench
from tests.verify.small_model import HIDDEN, RUN, VOCAB, SmallModel, Worker, bf16_bits, fixed_key
from verify.checks.prefill import judge_proofs, nearest_to_failing
from verify.formats.batch import BatchGroup, BatchManifest, open_batch, sign_batch
from verify.formats.lease import open_lease, sign_lease
from verify.formats.submission import KIND, Rollout
from verify.formats.verdict import CheckResult, open_verdict, sign_verdict
from verify.plugins import PrefillOutput
from verify.thresholds import BFLOAT16, FLOAT32, Limits
from verify.toploc import PRIME, Proof, build_proofs, build_proofs_batch, parse_proof
from verify.toploc.statistics import (
    ChunkStatistics,
    bits_against_guessing,
    verify_proofs,
    verify_proofs_batch,
)

pytestmark = pytest.mark.slow

WIDTH, CHUNKS, KNOWN = 128, 100, 300


@pytest.fixture(params=PRECISIONS)
def bench(request: pytest.FixtureRequest, run_of: Callable[..., Bench]) -> Bench:
    return run_of(request.param)


def changed(bench: Bench, row: int = 0, **fields: Any) -> list[Rollout]:
    rows = bench.honest()
    return [*rows[:row], replace(rows[row], **fields), *rows[row + 1 :]]


def proofs_of(bench: Bench, proof: bytes) -> list[Rollout]:
    return [replace(r, proofs=[proof] * len(r.proofs)) for r in bench.honest()]


# --- Proofs ---------------------------------------------------------------------------------------


class TestConstantProof:
    """One value at every position: what passed 181 of 200 chunks under the published rules."""

    @pytest.mark.parametrize("magnitude", [0x0000, 0x3F80, 0x4000, 0x4010, 0x4020])
    def test_it_is_rejected(self, bench: Bench, magnitude: int) -> None:
        proof = np.array([PRIME, magnitude] + [0] * 127, ">u2").tobytes()
        found = rejection(bench, proofs_of(bench, proof))
        assert (found.check, found.row) == ("toploc", 0) and found.value > found.limit


class TestNullProof:
    """Zeros, or no proof at all: the published verifier dies on these, or is silent."""

    def test_it_is_rejected(self, bench: Bench) -> None:
        found = rejection(bench, proofs_of(bench, bytes(258)))
        assert (found.check, found.row) == ("proof_format", 0) and "modulus 0" in found.words
        zero = np.array([PRIME] + [0] * 128, ">u2").tobytes()
        assert rejection(bench, proofs_of(bench, zero)).check == "toploc"
        for size in (0, 257, 259):
            with pytest.raises(ValueError, match=f"{size} bytes instead of 258"):
                bench.packed(proofs_of(bench, bytes(size)))


class TestReplayedProofs:
    """Well-formed proofs of real activations, of another rollout than the one handed in."""

    def test_of_another_row(self, bench: Bench) -> None:
        rows = bench.honest()
        first, second = [i for i, r in enumerate(rows) if len(r.proofs) == 1][:2]
        rows[first] = replace(rows[first], proofs=rows[second].proofs)
        found = rejection(bench, rows)
        assert (found.check, found.row) == ("toploc", first)

    def test_of_an_earlier_submission(self, bench: Bench) -> None:
        old = bench.honest()
        take_lease(bench, 1)
        count = len(bench.honest()[0].proofs)
        kept = next(r.proofs for r in old if len(r.proofs) == count)
        found = rejection(bench, changed(bench, proofs=kept))
        assert (found.check, found.row) == ("toploc", 0)


class ShuffledStates(Worker):
    """Right tokens and log-probs, proofs of other activations."""

    def explain(self, prompt: list[int], tokens: list[int]) -> PrefillOutput:
        truth = super().explain(prompt, tokens)
        return replace(truth, hidden=np.roll(truth.hidden, HIDDEN // 2, axis=1))


class TestProofsOfOtherActivations:
    """The right magnitudes at other places."""

    def test_they_are_rejected(self, bench: Bench) -> None:
        found = rejection(bench, bench.rollouts_of(like(bench, ShuffledStates)))
        assert found.check == "toploc" and found.value > found.limit


# --- Proofs by who knows the model's statistics, and not the activations (`toploc.statistics`) ----


def states(count: int, seed: int, *, rows: int = 32, outliers: int = 6) -> np.ndarray:
    """u16 [count, rows, 128]: some channels are large, of one sign, and vary by a tenth."""
    rng = np.random.default_rng(seed)
    values = rng.normal(size=(count, rows, WIDTH)).astype(np.float32)
    large = 8 + 8 * np.arange(outliers) / 6
    values[..., :outliers] = large * (1 + 0.1 * rng.normal(size=(count, rows, outliers)))
    return values.astype(ml_dtypes.bfloat16).view(np.uint16)


@pytest.fixture(scope="module")
def forged() -> list[bytes]:
    """A proof of each kind that we could devise: of a value, channels, cells, tokens, a replay."""
    tokens = np.random.default_rng(5).integers(0, 250, (KNOWN, 34)).astype(np.int32)
    library = Library(states(KNOWN, seed=1), tokens)
    found = selected(library.hidden)
    table, replay = TokenTable(library).proofs(tokens[:1])[0], build_proofs(library.hidden[0])[0]
    return [constant(found, 64), channels(found, WIDTH, 64), cells(found, 8), table, replay]


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


def passes(hidden: np.ndarray, proof: bytes, limits: Limits) -> list[bool]:
    """Of chunks, each with that proof."""
    found = verify_proofs_batch(list(hidden), [[proof]] * len(hidden))
    assert all(isinstance(one, list) for one in found)
    return [judge([each], limits).passed for one in found for each in one]


def honest_passes(hidden: np.ndarray, sent: np.ndarray, limits: Limits) -> None:
    """Proofs of what was sent pass with what is true, and are worth something."""
    for true, proofs in zip(hidden, build_proofs_batch(list(sent)), strict=True):
        verdict = judge(verify_proofs(true, proofs), limits)
        assert verdict.passed and "too predictable" not in verdict.reason


class TestForgedProof:
    """The best precomputed forgeries that we could devise: of channels, cells, tables of tokens."""

    @pytest.mark.parametrize("limits", [FLOAT32, BFLOAT16], ids=PRECISIONS)
    def test_no_forgery_passes(self, forged: list[bytes], limits: Limits) -> None:
        hidden = states(CHUNKS, seed=2)
        assert not any(any(passes(hidden, proof, limits)) for proof in forged)
        honest_passes(hidden, hidden, FLOAT32)

    def test_a_models_states_cannot_be_forged_and_those_of_a_bf16_engine_pass(self) -> None:
        # given a real model, whose next state follows from the last token to a large part
        known, real = model_chunks(MODEL, 400, seed=1), model_chunks(MODEL, CHUNKS, seed=2)
        found, table = selected(known.hidden), TokenTable(known)
        # when forgers use what they know of it, and of the tokens
        made = [
            *(constant(found, 64), channels(found, HIDDEN, 64), channels(found, HIDDEN, 8)),
            *(cells(found, 64), cells(found, 8)),
        ]
        assert not any(any(passes(real.hidden, proof, BFLOAT16)) for proof in made)
        # (three tokens nearly give this model's state: within the limits of bf16 it comes close)
        by_table = zip(real.hidden, table.proofs(real.tokens), strict=True)
        assert not any(passes(hidden[None], proof, FLOAT32) == [True] for hidden, proof in by_table)
        # then none passes, and an honest engine that rounds to bf16 does
        rounded = model_chunks(MODEL.in_bfloat16(), CHUNKS, seed=2)
        honest_passes(real.hidden, rounded.hidden, BFLOAT16)


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
        assert found.missing_terms == 127 - degree and not judge([found], BFLOAT16).passed


class TestBoundOfGuesses:
    """What no forger of whole channels exceeds."""

    @pytest.mark.parametrize("rows", [2, 5, 32])
    @pytest.mark.parametrize("outliers", [0, 6])
    def test_whole_channels_never_hit_more_than_was_said(self, rows: int, outliers: int) -> None:
        # given what a value for each of the channels granted hits, chosen on the very activations
        hidden = states(20, seed=7, rows=rows, outliers=outliers)
        selection = selected(hidden)
        found = verify_proofs_batch(list(hidden), build_proofs_batch(list(hidden)))
        values, column = ordered(selection.bits), selection.indices % WIDTH
        for chunk, one in enumerate(found):
            assert isinstance(one, list)
            hits = []
            for channel in range(WIDTH):
                there = values[chunk][column[chunk] == channel]
                best = max((np.sum((there >= v) & (there <= v + 16)) for v in there), default=0)
                hits.append(int(best))
            granted = -(-256 // rows)
            assert one[0].guessable[0] == sum(sorted(hits)[-granted:])

    @pytest.mark.parametrize(("hits", "required"), [(10, 90), (64, 104), (0, 1), (128, 120)])
    def test_the_bits_bound_the_exact_binomial_tail(self, hits: int, required: int) -> None:
        rate = hits / 128
        tail = sum(comb(128, i) * rate**i * (1 - rate) ** (128 - i) for i in range(required, 129))
        assert tail <= 2.0 ** -bits_against_guessing(128, hits, required) + 1e-300


# --- Numbers --------------------------------------------------------------------------------------


class TestTamperedLogprobs:
    """Claims that favour its tokens in the learner's ratio."""

    @pytest.mark.parametrize("shift", [-0.2, 0.2, -5.0])
    def test_of_all_rows(self, bench: Bench, shift: float) -> None:
        moved = [np.minimum(r.logprobs + np.float32(shift), 0) for r in bench.honest()]
        rows = [replace(r, logprobs=m) for r, m in zip(bench.honest(), moved, strict=True)]
        found = rejection(bench, rows)
        assert found.check == "logprobs_submission"
        assert abs(shift) * 1.01 >= found.value >= 0.1 > found.limit

    def test_of_one_row(self, bench: Bench) -> None:
        rows = bench.honest()
        row = min(range(len(rows)), key=lambda n: len(rows[n].output_tokens))
        found = rejection(bench, changed(bench, row, logprobs=rows[row].logprobs - np.float32(0.2)))
        assert found.check in ("logprobs", "logprobs_submission") and found.value > found.limit


class TestTamperedRewards:
    """Claims a reward that its tokens do not earn. The validator's own number is what trains."""

    @pytest.mark.parametrize("field", ["task_reward", "length_penalty"])
    def test_the_claim_is_compared(self, bench: Bench, field: str) -> None:
        claimed = getattr(bench.honest()[3], field) + 0.001
        found = rejection(bench, changed(bench, 3, **{field: claimed}))
        assert (found.check, found.row) == ("reward", 3)
        assert found.value == pytest.approx(0.001, rel=0.01)

    def test_the_verdict_has_the_graders_number(self, bench: Bench) -> None:
        honest = bench.verdict(bench.honest())
        verdict = bench.verdict(changed(bench, 3, task_reward=100.0))
        assert [row.reward for row in verdict.rows] == [row.reward for row in honest.rows]


class TestOutOfRangeTokens:
    """Tokens that index past the end of a table."""

    @pytest.mark.parametrize("token", [-1, VOCAB, 2**31 - 1, -(2**31)])
    def test_the_model_is_not_asked(self, bench: Bench, token: int) -> None:
        tokens = bench.honest()[2].output_tokens.copy()
        tokens[0] = token
        reason = refused(bench, *bench.packed(changed(bench, 2, output_tokens=tokens)))
        assert reason.startswith(f"bounds: row 2: token {token} outside the vocabulary of {VOCAB}")

    def test_in_the_prompt(self, bench: Bench) -> None:
        prompt = np.array([2**31 - 1, *bench.honest()[2].prompt_tokens[1:]], np.int32)
        reason = refused(bench, *bench.packed(changed(bench, 2, prompt_tokens=prompt)))
        assert reason.startswith("assignment: row 2: the prompt is not the assigned problem's")


class TestNotFinite:
    """NaN passes every comparison that is written the wrong way round."""

    @pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
    @pytest.mark.parametrize("field", ["logprobs", "task_reward", "length_penalty"])
    def test_the_model_is_not_asked(self, bench: Bench, field: str, value: float) -> None:
        claimed = bench.honest()[1].logprobs.copy()
        claimed[-1] = value
        new = claimed if field == "logprobs" else value
        reason = refused(bench, *bench.packed(changed(bench, 1, **{field: new})))
        assert reason.startswith("bounds: row 1: ")

    @pytest.mark.parametrize("field", ["temperature", "top_p"])
    def test_in_the_sampling_parameters(self, bench: Bench, field: str) -> None:
        reason = refused(bench, *bench.packed(changed(bench, 1, **{field: np.nan})))
        assert reason.startswith(f"assignment: row 1: {field} is 'nan'")


# --- Signatures -----------------------------------------------------------------------------------


def flipped(document: bytes) -> bytes:
    place = document.index(b'"signature":"') + 20
    return document[:place] + bytes([document[place] ^ 1]) + document[place + 1 :]


class TestForgedSignature:
    """Each document counts with the signature of whoever may sign it, and with no other."""

    def test_of_a_submission(self, run_of: Callable[..., Bench]) -> None:
        bench = run_of()
        envelope, table = bench.packed(bench.honest())
        assert refused(bench, flipped(envelope), table).startswith("signature: submission: ")
        # a sound signature, of another key than the worker's that the envelope names
        named = sign_document(KIND, json.loads(envelope)["payload"], fixed_key(9))
        assert "another key than its worker's" in refused(bench, named, table)

    @pytest.mark.parametrize("what", ["lease", "verdict", "batch"])
    def test_of_what_the_run_signs(self, run_of: Callable[..., Bench], what: str) -> None:
        digest, keys = digest_bytes(b""), frozenset({fixed_key(2).public_hex})
        names = {"submission": digest, "accepted": True, "reason": "", "dropped_groups": []}
        manifest = BatchManifest(RUN, 0, [BatchGroup(digest, digest, 0, 0, 0)], True, {}, 1, digest)
        signed_by, opened = {
            "lease": (
                lambda key: sign_lease(run_of().lease, key),
                lambda document: open_lease(document, coordinators=keys),
            ),
            "verdict": (
                lambda key: sign_verdict(b"table", run=RUN, step=0, **names, key=key),
                lambda document: open_verdict(document, validators=keys),
            ),
            "batch": (
                lambda key: sign_batch(manifest, key),
                lambda document: open_batch(document, coordinators=keys, run=RUN, step=0),
            ),
        }[what]
        good = signed_by(fixed_key(2))
        assert opened(good).step == 0
        other = good.replace(b'"step":0', b'"step":1')
        for document in (signed_by(fixed_key(1)), flipped(good), other):
            with pytest.raises(BadSignature):
                opened(document)
