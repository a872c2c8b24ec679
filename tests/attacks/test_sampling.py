"""Workers that sample something else than leased: each is caught by a named check.

Every claim is as consistent as its worker can make it: log-probs and proofs are those of a prefill
of the tokens handed in, rewards are graded honestly.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.verify.bench import MODEL, Bench, lease_for
from tests.verify.small_model import (
    EOS,
    HIDDEN,
    VOCAB,
    SmallModel,
    Worker,
    log_softmax,
    token_noise,
)

PRECISIONS = ["float32", "bfloat16"]


@pytest.fixture(params=PRECISIONS)
def bench(request: pytest.FixtureRequest, tmp_path: Path) -> Bench:
    """In bf16 the worker's engine rounds too, and the wider limits apply."""
    bench = Bench(tmp_path, dtype=request.param)
    if request.param == "bfloat16":
        bench.worker.model = MODEL.in_bfloat16()
    return bench


def like(bench: Bench, kind: type[Worker], model: SmallModel | None = None) -> Worker:
    """A dishonest worker with the honest one's key, lease and precision."""
    honest = bench.worker
    model = replace(model or honest.model, dtype=honest.model.dtype)
    return kind(honest.key, model, honest.spec, honest.task_set)


def mean_distance(model: SmallModel, bench: Bench) -> float:
    """Mean |dlogp| between the leased version and another on the latter's own outputs."""
    other = like(bench, Worker, model)
    distances = []
    for row in bench.rollouts_of(other):
        truth = Worker(other.key, MODEL, other.spec, other.task_set).explain(
            row.prompt_tokens.tolist(), row.output_tokens.tolist()
        )
        distances.append(np.abs(row.logprobs - truth.logprobs))
    return float(np.concatenate(distances).mean())


def rejected_by(bench: Bench, worker: Worker) -> str:
    verdict = bench.verdict(bench.rollouts_of(worker))
    assert not verdict.accepted
    return verdict.reason.split(":")[0]


@pytest.mark.parametrize("scale", [0.03, 0.06])
def test_perturbed_weights(bench: Bench, scale: float) -> None:
    perturbed = MODEL.perturbed(scale)
    assert mean_distance(perturbed, bench) >= 0.05  # as the issue sets it

    assert rejected_by(bench, like(bench, Worker, perturbed)) == "logprobs_submission"


class ClaimsTheLeasedModel(Worker):
    """Samples from other weights, then claims log-probs and proofs of the leased version."""

    def explain(self, prompt, tokens):
        leased = replace(MODEL, dtype=self.model.dtype)
        return Worker(self.key, leased, self.spec, self.task_set).explain(prompt, tokens)


def test_perturbed_weights_behind_honest_claims(bench: Bench) -> None:
    """Seeded sampling alone sees this: prefilled by the right model, the tokens look right."""
    worker = like(bench, ClaimsTheLeasedModel, MODEL.perturbed(0.04))
    assert rejected_by(bench, worker).startswith("seeded_sampling")


def test_another_versions_weights(bench: Bench) -> None:
    worker = like(bench, Worker, SmallModel.random(seed=8))
    assert rejected_by(bench, worker) == "logprobs_submission"


class EditsTokens(Worker):
    """Replaces one token in the middle by another and prefills the edited text."""

    def sample(self, prompt, key):
        tokens = super().sample(prompt, key)
        if len(tokens) > 4:
            tokens[len(tokens) // 2] = 1 + tokens[len(tokens) // 2] % (VOCAB - 1)
        return tokens


def test_tokens_edited_and_prefilled_again(bench: Bench) -> None:
    assert rejected_by(bench, like(bench, EditsTokens)) == "seeded_sampling"


class EditsTokensOnly(EditsTokens):
    """Edits the tokens, and claims what was computed before the edit."""

    def explain(self, prompt, tokens):
        before = list(tokens)
        if len(tokens) > 4:
            before[len(tokens) // 2] = 1 + (tokens[len(tokens) // 2] - 2) % (VOCAB - 1)
        return super().explain(prompt, before)


def test_tokens_edited_under_the_old_claims(bench: Bench) -> None:
    assert rejected_by(bench, like(bench, EditsTokensOnly)) == "logprobs_submission"


class EditsLastToken(Worker):
    """The last token is an input to no activation: no proof covers it."""

    def sample(self, prompt, key):
        tokens = super().sample(prompt, key)
        if tokens[-1] != EOS:
            tokens[-1] = 1 + tokens[-1] % (VOCAB - 1)
        return tokens


def test_last_token_edited(bench: Bench) -> None:
    assert rejected_by(bench, like(bench, EditsLastToken)) == "seeded_sampling"


class EndsEarly(Worker):
    """Cuts an output after a few tokens, with an end token."""

    def sample(self, prompt, key):
        tokens = super().sample(prompt, key)
        return tokens if len(tokens) < 6 else [*tokens[:4], EOS]


def test_output_cut_with_an_end_token(bench: Bench) -> None:
    assert rejected_by(bench, like(bench, EndsEarly)) == "seeded_sampling"


class OtherNoise(Worker):
    """Draws with noise of its own choosing, as best-of-n would."""

    def sample(self, prompt, key):
        return super().sample(prompt, (key[0] ^ 1, key[1]))


class Greedy(Worker):
    """Takes the likeliest token."""

    def sample(self, prompt, key):
        return self.sample_with(prompt, key, temperature=1e-6)

    def sample_with(self, prompt, key, *, temperature):
        state, tokens = self.model.read(prompt), []
        while len(tokens) < 40 and (not tokens or tokens[-1] != EOS):
            _, logits = self.model.output(state)
            scaled = log_softmax(logits / np.float32(temperature))
            tokens.append(int(np.argmax(scaled + token_noise(key, len(tokens)))))
            state = self.model.step(state, tokens[-1])
        return tokens


class Cooler(Greedy):
    """Samples at half the temperature with the leased noise."""

    def sample(self, prompt, key):
        return self.sample_with(prompt, key, temperature=0.4)


@pytest.mark.parametrize("attack", [OtherNoise, Greedy, Cooler])
def test_another_sampler(bench: Bench, attack: type[Worker]) -> None:
    assert rejected_by(bench, like(bench, attack)) == "seeded_sampling"


class LogprobsOff(Worker):
    """Claims log-probs that favour its tokens in the learner's ratio."""

    def explain(self, prompt, tokens):
        truth = super().explain(prompt, tokens)
        return replace(truth, logprobs=truth.logprobs - np.float32(0.2))


def test_tampered_logprobs(bench: Bench) -> None:
    assert rejected_by(bench, like(bench, LogprobsOff)) == "logprobs_submission"


class ShuffledStates(Worker):
    """Right tokens and log-probs, proofs of other activations."""

    def explain(self, prompt, tokens):
        truth = super().explain(prompt, tokens)
        return replace(truth, hidden=np.roll(truth.hidden, HIDDEN // 2, axis=1))


def test_proofs_of_other_activations(bench: Bench) -> None:
    assert rejected_by(bench, like(bench, ShuffledStates)) == "toploc"


def test_proofs_of_another_rollout(bench: Bench) -> None:
    rows = bench.honest()
    same = [i for i, r in enumerate(rows) if len(r.proofs) == len(rows[-1].proofs)]
    assert len(same) > 1
    rows[same[0]] = replace(rows[same[0]], proofs=rows[same[1]].proofs)
    assert bench.verdict(rows).reason.startswith(f"toploc: row {same[0]}: ")


@pytest.mark.parametrize("magnitude", [0x0000, 0x3F80, 0x4000, 0x4010, 0x4020])
def test_constant_proofs(bench: Bench, magnitude: int) -> None:
    constant = np.array([65497, magnitude] + [0] * 127, ">u2").tobytes()
    rows = [replace(r, proofs=[constant] * len(r.proofs)) for r in bench.honest()]
    assert bench.verdict(rows).reason.startswith("toploc: row 0: ")


TRUNCATED = [
    {"temperature": 0.8, "top_p": 0.8},
    {"temperature": 0.8, "top_k": 4},
    {"temperature": 0.8, "top_p": 0.9, "top_k": 10},
]


def truncated(bench_directory: Path, sampling: dict[str, float], dtype: str) -> Bench:
    bench = Bench(bench_directory, dtype=dtype, sampling=sampling)
    if dtype == "bfloat16":
        bench.worker.model = MODEL.in_bfloat16()
    return bench


@pytest.mark.parametrize("sampling", TRUNCATED, ids=str)
@pytest.mark.parametrize("dtype", PRECISIONS)
def test_honest_rounding_at_the_edge_of_the_nucleus_passes(
    tmp_path: Path, sampling: dict[str, float], dtype: str
) -> None:
    """Every bf16 logit is a little off, so some sampled token is outside the validator's set."""
    bench = truncated(tmp_path, sampling, dtype)
    for index in range(6):
        bench.signed_lease, bench.lease = lease_for(
            bench.worker_key, bench.coordinator_key, index=index
        )
        verdict = bench.verdict(bench.honest())
        assert verdict.accepted, verdict.reason


class IgnoresTheCut(Worker):
    """Samples from the whole distribution, where the spec keeps a part."""

    def sample(self, prompt, key):
        pool = self.spec.samplers[0]
        whole = pool.sampling.model_copy(update={"top_p": 1.0, "top_k": -1})
        spec = self.spec.model_copy(
            update={"samplers": [pool.model_copy(update={"sampling": whole})]}
        )
        return Worker(self.key, self.model, spec, self.task_set).sample(prompt, key)


class OneTokenOutside(Worker):
    """Replaces one token by the least likely one, which nobody keeps."""

    def sample(self, prompt, key):
        tokens = super().sample(prompt, key)
        if len(tokens) > 4:
            _, logits = self.model.output(self.model.read([*prompt, *tokens[:2]]))
            tokens[2] = int(np.argmin(logits[1:])) + 1
        return tokens


@pytest.mark.parametrize("sampling", TRUNCATED, ids=str)
@pytest.mark.parametrize("dtype", PRECISIONS)
@pytest.mark.parametrize("attack", [IgnoresTheCut, OneTokenOutside])
def test_tokens_outside_the_nucleus(
    tmp_path: Path, sampling: dict[str, float], dtype: str, attack: type[Worker]
) -> None:
    bench = truncated(tmp_path, sampling, dtype)
    assert rejected_by(bench, like(bench, attack)) == "seeded_sampling"


class CutsMore(Worker):
    """Samples from fewer tokens than the spec keeps, which raises rewards at no one's leave."""

    def sample(self, prompt, key):
        pool = self.spec.samplers[0]
        less = pool.sampling.model_copy(update={"top_p": 0.4})
        spec = self.spec.model_copy(
            update={"samplers": [pool.model_copy(update={"sampling": less})]}
        )
        return Worker(self.key, self.model, spec, self.task_set).sample(prompt, key)


@pytest.mark.parametrize("dtype", PRECISIONS)
def test_a_smaller_nucleus_than_the_specs(tmp_path: Path, dtype: str) -> None:
    bench = truncated(tmp_path, {"temperature": 0.8, "top_p": 0.9}, dtype)
    assert rejected_by(bench, like(bench, CutsMore)) == "seeded_sampling"
