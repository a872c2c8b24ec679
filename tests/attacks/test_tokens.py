"""Tokens that the leased version did not choose: of a smaller model, edited, cut off, padded.

Every claim is as consistent as its worker can make it: but where a test says so, log-probs and
proofs are those of a prefill of the tokens handed in by the leased version, rewards are graded
honestly.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from tests.attacks.policies import smaller
from tests.attacks.setting import PRECISIONS, behind_honest_claims, like, rejection
from tests.verify.bench import MODEL, Bench
from tests.verify.small_model import EOS, VOCAB, Worker, log_softmax, token_noise
from verify.plugins import PrefillOutput


@pytest.fixture(params=PRECISIONS)
def bench(request: pytest.FixtureRequest, run_of: Callable[..., Bench]) -> Bench:
    return run_of(request.param)


class TestSmallerModelsTokens:
    """A cheaper model samples, the leased one prefills: TOPLOC alone sees nothing wrong."""

    @pytest.mark.parametrize("units", [32, 56])
    def test_prefilled_by_the_leased_model(self, bench: Bench, units: int) -> None:
        worker = behind_honest_claims(bench, like(bench, Worker, smaller(MODEL, units)))
        found = rejection(bench, bench.rollouts_of(worker))
        assert found.check == "seeded_sampling"
        assert found.value >= 0.5 > found.limit

    def test_under_its_own_claims(self, bench: Bench) -> None:
        worker = like(bench, Worker, smaller(MODEL, 56))
        found = rejection(bench, bench.rollouts_of(worker))
        assert (found.check, found.value > 0.3) == ("logprobs_submission", True)


class EditsTokens(Worker):
    """Replaces one token in the middle by another and prefills the edited text."""

    def sample(self, prompt: list[int], key: tuple[int, int]) -> list[int]:
        tokens = super().sample(prompt, key)
        if len(tokens) > 4:
            tokens[len(tokens) // 2] = 1 + tokens[len(tokens) // 2] % (VOCAB - 1)
        return tokens


class EditsTokensOnly(EditsTokens):
    """Edits the tokens, and claims what was computed before the edit."""

    def explain(self, prompt: list[int], tokens: list[int]) -> PrefillOutput:
        before = list(tokens)
        if len(tokens) > 4:
            before[len(tokens) // 2] = 1 + (tokens[len(tokens) // 2] - 2) % (VOCAB - 1)
        return super().explain(prompt, before)


class TestEditedToken:
    """One token exchanged after sampling, for a better reward."""

    def test_prefilled_again(self, bench: Bench) -> None:
        found = rejection(bench, bench.rollouts_of(like(bench, EditsTokens)))
        assert found.check == "seeded_sampling"
        assert found.value >= 0.5 > found.limit

    def test_in_one_row_alone(self, bench: Bench) -> None:
        honest, edited = bench.honest(), bench.rollouts_of(like(bench, EditsTokens))
        row = max(range(len(edited)), key=lambda n: len(edited[n].output_tokens))
        rows = [*honest[:row], edited[row], *honest[row + 1 :]]
        assert (rejection(bench, rows).check, rejection(bench, rows).row) == (
            "seeded_sampling",
            row,
        )

    def test_under_the_old_claims(self, bench: Bench) -> None:
        found = rejection(bench, bench.rollouts_of(like(bench, EditsTokensOnly)))
        assert found.check == "logprobs_submission"
        assert found.value >= 0.3 > found.limit


class EditsLastToken(Worker):
    """Where an output ended at the longest, its last token is exchanged."""

    def sample(self, prompt: list[int], key: tuple[int, int]) -> list[int]:
        tokens = super().sample(prompt, key)
        if tokens[-1] != EOS:
            tokens[-1] = 1 + tokens[-1] % (VOCAB - 1)
        return tokens


class TestEditedLastToken:
    """The last token is an input to no activation: no proof covers it, the seeded choice does."""

    def test_prefilled_again(self, bench: Bench) -> None:
        rows, honest = bench.rollouts_of(like(bench, EditsLastToken)), bench.honest()
        # given rows whose proofs are byte for byte those of honest ones
        assert [row.proofs for row in rows] == [row.proofs for row in honest]
        found = rejection(bench, rows)
        # then the gap that decided is that of the last token
        assert found.check == "seeded_sampling" and found.value >= 0.5
        assert f"gap of token {len(rows[found.row].output_tokens) - 1}," in found.words


class EndsEarly(Worker):
    """Cuts an output after a few tokens, with an end token."""

    def sample(self, prompt: list[int], key: tuple[int, int]) -> list[int]:
        tokens = super().sample(prompt, key)
        return tokens if len(tokens) < 6 else [*tokens[:4], EOS]


class TestTruncatedOutput:
    """Cut short to save tokens, with an end token of the worker's or without any."""

    def test_with_an_end_token(self, bench: Bench) -> None:
        found = rejection(bench, bench.rollouts_of(like(bench, EndsEarly)))
        assert found.check == "seeded_sampling"
        assert found.value >= 0.5 > found.limit

    @pytest.mark.parametrize("reason", ["stop", "length"])
    def test_without_an_end_token(self, bench: Bench, reason: str) -> None:
        rows = bench.honest()
        row = max(range(len(rows)), key=lambda n: len(rows[n].output_tokens))
        cut = replace(
            rows[row],
            output_tokens=rows[row].output_tokens[:5],
            logprobs=rows[row].logprobs[:5],
            finish_reason=reason,
        )
        found = rejection(bench, [*rows[:row], cut, *rows[row + 1 :]])
        assert (found.check, found.row) == ("termination", row)


class NeverEnds(Worker):
    """Goes on to the longest output: the end token is never taken."""

    def sample(self, prompt: list[int], key: tuple[int, int]) -> list[int]:
        pool, state, tokens = self.spec.samplers[0], self.model.read(prompt), []
        for place in range(pool.max_new_tokens):
            scaled = log_softmax(self.model.output(state)[1] / pool.sampling.temperature)
            tokens.append(1 + int(np.argmax((scaled + token_noise(key, place))[1:])))
            state = self.model.step(state, tokens[-1])
        return tokens


class TestPaddedOutput:
    """Made longer, for the target length's sake or for credit."""

    def test_by_never_ending(self, bench: Bench) -> None:
        found = rejection(bench, bench.rollouts_of(like(bench, NeverEnds)))
        assert found.check == "seeded_sampling"
        assert found.value > found.limit

    def test_by_tokens_after_the_end(self, bench: Bench) -> None:
        rows = bench.honest()
        row = next(n for n, r in enumerate(rows) if r.finish_reason == "stop")
        longer = [*rows[row].output_tokens.tolist(), 7, 7, EOS]
        claims = bench.worker.explain(rows[row].prompt_tokens.tolist(), longer)
        rows[row] = replace(
            rows[row], output_tokens=np.array(longer, np.int32), logprobs=claims.logprobs
        )
        found = rejection(bench, rows)
        assert (found.check, found.row) == ("termination", row)
