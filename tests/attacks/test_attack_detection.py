"""The benchmark of attacks on what is sampled: its engine is honest, its attacks are attacks."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import jax
import numpy as np
import pytest

from benchmarks.attack_detection import differ, judged
from benchmarks.attacks import book
from benchmarks.attacks.engine import Choice, Sampled, sample
from benchmarks.attacks.measure import Rows, detection, found_out, interval, rows_of
from benchmarks.attacks.policies import Weights
from benchmarks.attacks.site import ROLLOUTS, Pair, Site
from benchmarks.null.text_model import Size
from learner_jax.model import init_params
from verify.gap_noise import DRIFT, GapNoise
from verify.thresholds import FLOAT32

SUBMISSIONS = 2
SIZE = Size(32, 1, 0, 0, 0.0)


class Bench:
    """An untrained model of 32 units, its site, leases and honest outputs."""

    def __init__(self) -> None:
        params = init_params(SIZE.config, jax.random.key(0))
        self.weights = Weights(SIZE, params)
        prompts = np.random.default_rng(0).integers(1, 256, (50, 32)).astype(np.int32)
        self.site = Site(self.weights, prompts, Pair("float32", "float32"))
        self.leases = self.site.leases(0, SUBMISSIONS * ROLLOUTS)
        self.honest = self.sample()

    def sample(self, choice: Choice = Choice(), keys: np.ndarray | None = None) -> Sampled:  # noqa: B008
        keys = self.leases.keys if keys is None else keys
        prompts = self.leases.prompts
        return sample(self.weights, prompts, keys, choice, dtype="float32", rows=len(prompts))

    def judged(self, sampled: Sampled) -> tuple[Rows, list[str]]:
        subject, reasons = judged(self.site, self.leases, sampled, SUBMISSIONS)
        return rows_of(subject), reasons


@pytest.fixture(scope="module")
def bench() -> Bench:
    return Bench()


def test_honest_rollouts_of_another_engine_pass(bench: Bench) -> None:
    rows, reasons = bench.judged(bench.honest)
    assert reasons == ["", ""]
    assert not rows.failed.any()
    assert rows.distance.sum() / rows.tokens.sum() < 1e-5


GROSS: dict[str, Callable[[Bench], Sampled]] = {
    "greedy": lambda b: b.sample(Choice(noise=0.0)),
    "temperature x 0.8": lambda b: b.sample(Choice(0.8)),
    "top-k 20": lambda b: b.sample(Choice(top_k=20)),
    "top-p 0.8": lambda b: b.sample(Choice(top_p=0.8)),
    "other noise": lambda b: b.sample(keys=b.leases.keys ^ 1),
    "one token edited": lambda b: book._edited(b.honest, last=False),
    "last token edited": lambda b: book._edited(b.honest, last=True),
    "cut, end token": lambda b: book._cut(b.honest, end=True),
    "cut, no end": lambda b: book._cut(b.honest, end=False),
}


@pytest.mark.parametrize("name", GROSS)
def test_gross_attacks_are_rejected_behind_the_validators_own_claims(
    bench: Bench, name: str
) -> None:
    sampled = GROSS[name](bench)
    assert differ(sampled, bench.honest).reshape(SUBMISSIONS, -1).any(1).all()
    claimed = bench.site.claimed_by_validator(bench.leases, sampled)
    _, reasons = bench.judged(claimed)
    expected = "termination" if name == "cut, no end" else "seeded_sampling"
    assert [reason.split(":")[0] for reason in reasons] == [expected] * SUBMISSIONS


def test_a_row_that_fails_rejects_the_submission_that_holds_it() -> None:
    """One row of two fails: of submissions of n rows 1 - 2^-n are rejected."""
    zeros = np.zeros(2)
    failed = np.array([[False] * 4, [False, False, True, False]])
    rows = Rows(np.array([100, 100]), *[zeros] * 5, failed)
    found = detection(rows, FLOAT32, (1, 2, 4), 4000)
    assert [entry["detected"] for entry in found] == pytest.approx([0.5, 0.75, 0.9375], abs=0.03)
    assert [entry["tokens"] for entry in found] == [100, 200, 400]


def test_small_gaps_add_up_to_a_submissions_and_to_a_workers_limit() -> None:
    # given rollouts of 100 tokens, with the gaps of rounding, and with 1.4 and four times as much
    noise = GapNoise(cap=0.02, mean=1e-4, probability=1e-6)
    limits = replace(FLOAT32, gap=1.0, gap_mean=1.0, gap_noise=noise)

    def of(times: float) -> Rows:
        gaps = np.full(8, times * noise.mean * 100)
        zeros = np.zeros(8)
        return Rows(np.full(8, 100), zeros, gaps, gaps, zeros, zeros, np.zeros((8, 4), bool))

    tables = {times: detection(of(times), limits, (8, 256), 100) for times in (1.0, 1.4, 4.0)}
    # then of submissions four times is too much for 25,600 tokens, and nothing for 800
    rejected = {times: [entry["detected"] for entry in table] for times, table in tables.items()}
    assert rejected == {1.0: [0.0, 0.0], 1.4: [0.0, 0.0], 4.0: [0.0, 1.0]}
    # and of a worker 1.4 times is too much, after as many tokens as its excess needs
    assert found_out(of(1.0), noise, submissions=50, workers=10) == {"share": 0.0}
    needed = noise.largest_excess / ((1.4 - DRIFT) * noise.mean)
    found = found_out(of(1.4), noise, submissions=50, workers=10)
    assert found == {"share": 1.0, "tokens": math.ceil(needed / 3200) * 3200}


def test_the_interval_of_a_rate() -> None:
    """Of 3000 all: the rule of three, two-sided."""
    low, high = interval(3000, 3000)
    assert (round(low, 5), high) == (0.99877, 1.0)
    assert interval(0, 10)[0] == 0.0
