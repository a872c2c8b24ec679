"""Claims that are not so: proofs of other or of no activations, log-probs, rewards, numbers that no
honest row has, signatures.

Tokens are those of an honest worker.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from runspec.core.hashing import digest_bytes
from runspec.core.signed import BadSignature, sign_document
from tests.attacks.setting import PRECISIONS, like, refused, rejection, take_lease
from tests.verify.bench import Bench
from tests.verify.small_model import HIDDEN, RUN, VOCAB, Worker, fixed_key
from verify.formats.batch import BatchGroup, BatchManifest, open_batch, sign_batch
from verify.formats.lease import open_lease, sign_lease
from verify.formats.submission import KIND, Rollout
from verify.formats.verdict import open_verdict, sign_verdict
from verify.plugins import PrefillOutput
from verify.toploc.field import PRIME


@pytest.fixture(params=PRECISIONS)
def bench(request: pytest.FixtureRequest, run_of: Callable[..., Bench]) -> Bench:
    return run_of(request.param)


def changed(bench: Bench, row: int = 0, **fields: Any) -> list[Rollout]:
    rows = bench.honest()
    return [*rows[:row], replace(rows[row], **fields), *rows[row + 1 :]]


def proofs_of(bench: Bench, proof: Callable[[bytes], bytes]) -> list[Rollout]:
    return [replace(r, proofs=[proof(p) for p in r.proofs]) for r in bench.honest()]


# --- Proofs ---------------------------------------------------------------------------------------


class TestConstantProof:
    """One value at every position: what passed 181 of 200 chunks under the published rules."""

    @pytest.mark.parametrize("magnitude", [0x0000, 0x3F80, 0x4000, 0x4010, 0x4020])
    def test_it_is_rejected(self, bench: Bench, magnitude: int) -> None:
        constant = np.array([PRIME, magnitude] + [0] * 127, ">u2").tobytes()
        found = rejection(bench, proofs_of(bench, lambda _: constant))
        assert (found.check, found.row) == ("toploc", 0)
        assert found.value > found.limit


class TestNullProof:
    """Zeros, or no proof at all: the published verifier dies on these, or is silent."""

    def test_it_is_rejected(self, bench: Bench) -> None:
        found = rejection(bench, proofs_of(bench, lambda _: bytes(258)))
        assert (found.check, found.row) == ("proof_format", 0)
        assert "modulus 0" in found.words

    @pytest.mark.parametrize("size", [0, 257, 259])
    def test_no_file_holds_one_of_another_length(self, bench: Bench, size: int) -> None:
        with pytest.raises(ValueError, match=f"{size} bytes instead of 258"):
            bench.packed(proofs_of(bench, lambda _: bytes(size)))

    def test_a_polynomial_that_is_zero(self, bench: Bench) -> None:
        zero = np.array([PRIME] + [0] * 128, ">u2").tobytes()
        assert rejection(bench, proofs_of(bench, lambda _: zero)).check == "toploc"


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
        rows = bench.honest()
        count = next(len(r.proofs) for r in rows)
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


# --- Numbers --------------------------------------------------------------------------------------


class TestTamperedLogprobs:
    """Claims that favour its tokens in the learner's ratio."""

    @pytest.mark.parametrize("shift", [-0.2, 0.2, -5.0])
    def test_of_all_rows(self, bench: Bench, shift: float) -> None:
        rows = [
            replace(r, logprobs=np.minimum(r.logprobs + np.float32(shift), 0))
            for r in bench.honest()
        ]
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
        rows = changed(bench, 2, output_tokens=tokens)
        reason = refused(bench, *bench.packed(rows))
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

    worker, coordinator = fixed_key(1), fixed_key(2)

    def test_of_a_submission(self, run_of: Callable[..., Bench]) -> None:
        bench = run_of()
        envelope, table = bench.packed(bench.honest())
        assert refused(bench, flipped(envelope), table).startswith("signature: submission: ")

    def test_of_a_submission_in_anothers_name(self, run_of: Callable[..., Bench]) -> None:
        """A sound signature, of another key than the worker's that the envelope names."""
        bench = run_of()
        envelope, table = bench.packed(bench.honest())
        named = sign_document(KIND, json.loads(envelope)["payload"], fixed_key(9))
        assert "another key than its worker's" in refused(bench, named, table)

    @pytest.mark.parametrize("what", ["lease", "verdict", "batch"])
    def test_of_what_the_run_signs(self, run_of: Callable[..., Bench], what: str) -> None:
        digest = digest_bytes(b"")
        names = {"submission": digest, "accepted": True, "reason": "", "dropped_groups": []}
        groups = [BatchGroup(digest, digest, 0, 0, 0)]
        manifest = BatchManifest(RUN, 0, groups, True, {}, 1, digest)
        signed_by = {
            "lease": lambda key: sign_lease(run_of().lease, key),
            "verdict": lambda key: sign_verdict(b"table", run=RUN, step=0, **names, key=key),
            "batch": lambda key: sign_batch(manifest, key),
        }[what]
        keys = frozenset({self.coordinator.public_hex})
        opened = {
            "lease": lambda document: open_lease(document, coordinators=keys),
            "verdict": lambda document: open_verdict(document, validators=keys),
            "batch": lambda document: open_batch(document, coordinators=keys, run=RUN, step=0),
        }[what]
        good = signed_by(self.coordinator)
        assert opened(good).step == 0
        changed = good.replace(b'"step":0', b'"step":1')
        for document in (signed_by(self.worker), flipped(good), changed):
            with pytest.raises(BadSignature):
                opened(document)
