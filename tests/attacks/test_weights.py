"""Other weights than the leased version's: each is caught by the distance of its log-probs, and by
its choices where it claims log-probs and proofs of the leased version.

Of every attack three submissions are judged (some 140 tokens each). Rollouts are graded honestly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import ml_dtypes
import numpy as np
import pytest

from tests.attacks.conftest import (
    behind_honest_claims,
    decision,
    lease_version,
    like,
    rejection,
    take_lease,
)
from tests.verify.bench import MODEL, Bench
from tests.verify.small_model import EOS, VOCAB, SmallModel, Worker, log_softmax

pytestmark = pytest.mark.slow

SUBMISSIONS = 3
TEMPERATURE, LONGEST = 0.8, 24


def trained(updates: int, *, rate: float = 0.1, seed: int = 0) -> SmallModel:
    """The policy after some updates of its output head by REINFORCE: even tokens are rewarded.

    Each update samples 64 outputs and follows sum_t A (1[o_t] - p_t) h_t, A the reward minus the
    mean of all.
    """
    rng, model = np.random.default_rng(seed), MODEL
    for _ in range(updates):
        hidden, tokens, scores = outputs(model, rng.integers(1, VOCAB, 64), rng)
        alive = np.cumsum(tokens == EOS, axis=1) - (tokens == EOS) == 0
        reward = ((tokens % 2 == 0) & alive).sum(1) / alive.sum(1)
        weight = (reward - reward.mean())[:, None] * alive
        model = moved(model, hidden, tokens, scores, weight, rate)
    return model


def fine_tuned() -> SmallModel:
    """The policy after a step of cross-entropy of its head on a text: 1, 2, 3, ... again."""
    text = 1 + np.arange(8)[:, None] * 5 + np.arange(LONGEST)[None]
    tokens = 1 + text % (VOCAB - 1)
    hidden, _, scores = outputs(MODEL, np.ones(8, np.int64), tokens)
    return moved(MODEL, hidden, tokens, scores, np.ones(tokens.shape), 0.02)


def outputs(
    model: SmallModel, first: np.ndarray, chosen: np.random.Generator | np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Hidden states [B, n, D], tokens [B, n] (drawn, or given) and log-probs [B, n, V]."""
    state = np.zeros((len(first), model.mix.shape[0]), np.float32)
    hidden, tokens, scores, previous = [], [], [], first
    for place in range(LONGEST):
        state = np.tanh(model.embed[previous] + state @ model.mix)
        hidden.append(state / np.sqrt(np.mean(state**2, axis=1, keepdims=True)))
        scores.append(log_softmax(hidden[-1] @ model.head / TEMPERATURE))
        if isinstance(chosen, np.ndarray):
            previous = chosen[:, place]
        else:
            previous = np.argmax(scores[-1] + chosen.gumbel(size=scores[-1].shape), -1)
        tokens.append(previous)
    return np.stack(hidden, 1), np.stack(tokens, 1), np.stack(scores, 1)


def moved(
    model: SmallModel,
    hidden: np.ndarray,
    tokens: np.ndarray,
    scores: np.ndarray,
    weight: np.ndarray,
    rate: float,
) -> SmallModel:
    difference = np.eye(VOCAB)[tokens] - np.exp(scores)
    gradient = np.einsum("bn,bnd,bnv->dv", weight, hidden, difference)
    return replace(model, head=(model.head + rate * gradient / weight.shape[0]).astype(np.float32))


def rounded(largest: float, to: Callable[[np.ndarray], np.ndarray]) -> SmallModel:
    """Weights rounded, a scale for each column."""

    def quantised(weights: np.ndarray) -> np.ndarray:
        scale = np.abs(weights).max(axis=0, keepdims=True) / largest
        return (to(weights / scale).astype(np.float32) * scale).astype(np.float32)

    embed, mix, head = (quantised(weights) for weights in (MODEL.embed, MODEL.mix, MODEL.head))
    return replace(MODEL, embed=embed, mix=mix, head=head)


class Fp8Cache(SmallModel):
    """Keeps in float8 (e4m3) what it remembers of the past: here the state, in a transformer the
    keys and values."""

    def step(self, state: np.ndarray, token: int) -> np.ndarray:
        return super().step(state.astype(ml_dtypes.float8_e4m3fn).astype(np.float32), token)


TRAINED = trained(4)
WITH_FP8_CACHE = Fp8Cache(MODEL.embed, MODEL.mix, MODEL.head, MODEL.dtype)


@dataclass(frozen=True)
class Attack:
    """What is served in the place of the version that the lease names."""

    served: SmallModel
    least: float
    """What the mean |log-prob| of each submission moves at least, nats."""
    precisions: Sequence[str] = ("float32", "bfloat16")
    """Of pools. In one of another precision such weights pass for rounding (docs/attacks.md)."""
    behind: int = SUBMISSIONS
    """Submissions that are rejected at least where the claims are those of the leased version."""
    leased: SmallModel = MODEL
    version: int = 0

    def benches(self, run_of: Callable[..., Bench]) -> Iterator[tuple[str, Bench]]:
        for precision in self.precisions:
            bench = run_of(precision)
            if self.version:
                lease_version(bench, self.version, self.leased)
            for index in range(SUBMISSIONS):
                take_lease(bench, index)
                yield precision, bench


FP8 = ml_dtypes.float8_e4m3fn
ONLY_FLOAT32 = ["float32"]
ATTACKS = {
    "older": Attack(MODEL, 0.04, leased=TRAINED, version=4),
    "the version before": Attack(MODEL, 0.01, ONLY_FLOAT32, leased=trained(1), version=1),
    "newer": Attack(TRAINED, 0.04),
    # behind honest claims the tokens of one submission in three can tell nothing in bfloat16
    "another run's": Attack(trained(4, seed=1), 0.04, behind=2, leased=TRAINED, version=4),
    "another model's": Attack(SmallModel.random(seed=8), 1.0),
    "fine-tuned": Attack(fine_tuned(), 0.1),
    "perturbed by 4 %": Attack(MODEL.perturbed(0.04), 0.05),  # published TOPLOC limits let it pass
    "int8": Attack(rounded(2**7 - 1, np.round), 0.01, ONLY_FLOAT32, behind=2),
    "int4": Attack(rounded(2**3 - 1, np.round), 0.15),
    "fp8": Attack(rounded(448.0, lambda weights: weights.astype(FP8)), 0.035),
    "fp8 cache": Attack(WITH_FP8_CACHE, 0.01, ONLY_FLOAT32),
}


class TestOtherWeights:
    """Older, newer, another run's or model's, fine-tuned, perturbed, rounded."""

    @pytest.mark.parametrize("name", ATTACKS)
    def test_under_its_own_claims(self, run_of: Callable[..., Bench], name: str) -> None:
        attack = ATTACKS[name]
        for _, bench in attack.benches(run_of):
            assert bench.verdict(bench.honest()).accepted  # the leased version passes
            found = rejection(bench, bench.rollouts_of(like(bench, Worker, attack.served)))
            assert found.check == "logprobs_submission"
            assert found.value >= attack.least > found.limit

    @pytest.mark.parametrize("name", ATTACKS)
    def test_behind_honest_claims(self, run_of: Callable[..., Bench], name: str) -> None:
        """Prefilled by the right version, the tokens alone can tell: the seeded choice does."""
        attack = ATTACKS[name]
        found: dict[str, list[str]] = {precision: [] for precision in attack.precisions}
        for precision, bench in attack.benches(run_of):
            worker = behind_honest_claims(bench, like(bench, Worker, attack.served))
            verdict = bench.verdict(bench.rollouts_of(worker))
            if not verdict.accepted:
                found[precision].append(decision(verdict).check)
        for checks in found.values():
            assert len(checks) >= attack.behind
            assert set(checks) <= {"seeded_sampling", "seeded_sampling_submission"}

    def test_of_the_size_that_must_be_caught(self, run_of: Callable[..., Bench]) -> None:
        """At least 0.05 nats: 3 % of this model's weights."""
        for bench in map(run_of, ("float32", "bfloat16")):
            found = rejection(bench, bench.rollouts_of(like(bench, Worker, MODEL.perturbed(0.03))))
            assert found.check == "logprobs_submission" and found.value >= 0.05


class TestCheaperArithmetic:
    """bfloat16, its cache in float8 or not, where the pool promises float32."""

    @pytest.mark.parametrize(("served", "distance"), [(MODEL, 0.004), (WITH_FP8_CACHE, 0.01)])
    def test_under_its_own_claims(self, bench: Bench, served: SmallModel, distance: float) -> None:
        bench.worker.model = replace(served, dtype=ml_dtypes.bfloat16)
        found = rejection(bench, bench.honest())
        assert found.check == "logprobs_submission"
        assert found.value >= distance > found.limit
