"""Other weights than the leased version's: each is caught by the distance of its log-probs, and by
its choices where it claims log-probs and proofs of the leased version.

Of every attack three submissions are judged (some 140 tokens each). Rollouts are graded honestly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import ml_dtypes
import pytest

from tests.attacks.policies import (
    fine_tuned,
    rounded,
    rounded_to_fp8,
    trained,
    with_fp8_cache,
)
from tests.attacks.setting import (
    behind_honest_claims,
    decision,
    lease_version,
    like,
    rejection,
    take_lease,
)
from tests.verify.bench import MODEL, Bench
from tests.verify.small_model import SmallModel, Worker

SUBMISSIONS = 3
TRAINED = trained(MODEL, 4)


class OtherWeights:
    """An attack: which version the lease names, and what is served in its place."""

    leased: SmallModel = MODEL
    version = 0
    served: SmallModel
    distance: dict[str, float]
    """By precision of the pool: what the mean |log-prob| of each submission moves at least, nats.
    In a pool of another precision such weights pass for rounding (docs/attacks.md)."""
    behind = SUBMISSIONS
    """Submissions that are rejected at least where the claims are those of the leased version."""

    def settings(self, run_of: Callable[..., Bench]) -> Iterator[tuple[str, Bench]]:
        for precision in self.distance:
            bench = run_of(precision)
            if self.version:
                lease_version(bench, self.version, self.leased)
            for index in range(SUBMISSIONS):
                take_lease(bench, index)
                yield precision, bench

    def test_the_leased_version_passes(self, run_of: Callable[..., Bench]) -> None:
        for _, bench in self.settings(run_of):
            verdict = bench.verdict(bench.honest())
            assert verdict.accepted, verdict.reason

    def test_under_its_own_claims(self, run_of: Callable[..., Bench]) -> None:
        for precision, bench in self.settings(run_of):
            found = rejection(bench, bench.rollouts_of(like(bench, Worker, self.served)))
            assert found.check == "logprobs_submission"
            assert found.value >= self.distance[precision] > found.limit

    def test_behind_honest_claims(self, run_of: Callable[..., Bench]) -> None:
        """Prefilled by the right version, the tokens alone can tell: the seeded choice does."""
        found: dict[str, list[str]] = {precision: [] for precision in self.distance}
        for precision, bench in self.settings(run_of):
            worker = behind_honest_claims(bench, like(bench, Worker, self.served))
            verdict = bench.verdict(bench.rollouts_of(worker))
            if not verdict.accepted:
                found[precision].append(decision(verdict).check)
        for checks in found.values():
            assert len(checks) >= self.behind
            assert set(checks) <= {"seeded_sampling", "seeded_sampling_submission"}


class TestOlderWeights(OtherWeights):
    """Four updates behind: the worker skipped the download."""

    leased, version, served = TRAINED, 4, MODEL
    distance = {"float32": 0.04, "bfloat16": 0.04}


class TestWeightsOfTheVersionBefore(OtherWeights):
    """One update behind, where rounding leaves room to see it."""

    leased, version, served = trained(MODEL, 1), 1, MODEL
    distance = {"float32": 0.01}


class TestNewerWeights(OtherWeights):
    """Published after the lease was granted."""

    served = TRAINED
    distance = {"float32": 0.04, "bfloat16": 0.04}


class TestOtherRunsWeights(OtherWeights):
    """The same version of another run, which began with the same model. Behind honest claims the
    tokens of one submission in three can tell nothing in bfloat16."""

    leased, version, served = TRAINED, 4, trained(MODEL, 4, seed=1)
    distance = {"float32": 0.04, "bfloat16": 0.04}
    behind = 2


class TestAnotherModelsWeights(OtherWeights):
    """A model that shares nothing with the leased one."""

    served = SmallModel.random(seed=8)
    distance = {"float32": 1.0, "bfloat16": 1.0}


class TestFineTunedWeights(OtherWeights):
    """One step of cross-entropy on a text of the worker's own."""

    served = fine_tuned(MODEL, 1, rate=0.02)
    distance = {"float32": 0.1, "bfloat16": 0.1}


class TestPerturbedWeights(OtherWeights):
    """Relative noise of 4 % on every weight: what published TOPLOC limits let pass."""

    served = MODEL.perturbed(0.04)
    distance = {"float32": 0.05, "bfloat16": 0.05}

    def test_of_the_size_that_must_be_caught(self, run_of: Callable[..., Bench]) -> None:
        """At least 0.05 nats: 3 % of this model's weights."""
        for bench in map(run_of, self.distance):
            found = rejection(bench, bench.rollouts_of(like(bench, Worker, MODEL.perturbed(0.03))))
            assert found.check == "logprobs_submission" and found.value >= 0.05


class TestInt8Weights(OtherWeights):
    """Seen by the claims; of the tokens alone by two submissions of three."""

    served = rounded(MODEL, 8)
    distance = {"float32": 0.01}
    behind = 2


class TestInt4Weights(OtherWeights):
    served = rounded(MODEL, 4)
    distance = {"float32": 0.15, "bfloat16": 0.15}


class TestFp8Weights(OtherWeights):
    served = rounded_to_fp8(MODEL)
    distance = {"float32": 0.035, "bfloat16": 0.035}


class TestFp8Cache(OtherWeights):
    """What is kept of the past in float8: the state here, keys and values in a transformer."""

    served = with_fp8_cache(MODEL)
    distance = {"float32": 0.01}


class TestCheaperArithmetic:
    """bfloat16, its cache in float8 or not, where the pool promises float32."""

    @pytest.mark.parametrize(
        ("served", "distance"),
        [(MODEL, 0.004), (with_fp8_cache(MODEL), 0.01)],
        ids=["bfloat16", "float8 cache"],
    )
    def test_under_its_own_claims(self, bench: Bench, served: SmallModel, distance: float) -> None:
        bench.worker.model = replace(served, dtype=ml_dtypes.bfloat16)
        found = rejection(bench, bench.honest())
        assert found.check == "logprobs_submission"
        assert found.value >= distance > found.limit
