"""Budgets of gaps: honest ones keep them however they are distributed; they fall to the mean."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import binom

from verify.thresholds import DRIFT, SUBMISSIONS, GapNoise

CAP, MEAN = 0.02, 5e-5


def noise(probability: float = 1e-6) -> GapNoise:
    return GapNoise(CAP, MEAN, probability)


@pytest.mark.parametrize("probability", [0.1, 1e-3, 1e-6])
@pytest.mark.parametrize("tokens", [50, 1000, 30_000, 2_000_000])
def test_a_submission_of_the_widest_gaps_keeps_its_budget(tokens: int, probability: float) -> None:
    # given gaps of 0 or the cap alone, which spread most of all with a mean
    largest = noise(probability).largest_mean(tokens)
    # then the exact chance of more is at most the one stated
    gaps = np.floor(largest * tokens / CAP + 1e-9)
    assert binom.sf(gaps, tokens, MEAN / CAP) <= probability
    # and no more than a few standard deviations are given away
    exact = binom.isf(probability, tokens, MEAN / CAP)
    assert gaps <= exact + 2 + np.sqrt(exact)


def sums(mean: float, *, workers: int, submissions: int, tokens: int) -> np.ndarray:
    """f64 [workers]: the largest that a worker's sum of excesses came to, of gaps 0 or the cap."""
    rng, one = np.random.default_rng(0), noise()
    total, most = np.zeros(workers), np.zeros(workers)
    for _ in range(submissions):
        counted = CAP * rng.binomial(tokens, mean / CAP, workers)
        total = np.maximum(0.0, total + counted - DRIFT * one.mean * tokens)
        most = np.maximum(most, total)
    return most


def test_honest_workers_are_not_alarmed_at_more_often_than_stated() -> None:
    # given 5,000 honest workers with 500 submissions each, and a chance that can be counted
    workers, submissions = 5000, 500
    most = sums(MEAN, workers=workers, submissions=submissions, tokens=3000)
    chance = 0.2
    alarms = int((most > noise(chance).largest_excess).sum())
    expected = workers * chance * submissions / SUBMISSIONS
    assert alarms <= expected + 4 * np.sqrt(expected)
    # and the chance is no idle one: a twentieth of the limit is exceeded by many
    assert (most > noise(chance).largest_excess / 20).mean() > 0.5


def test_a_worker_of_twice_the_mean_is_found_out_in_time() -> None:
    # given as many tokens as its excess takes to reach the limit, twice
    one, tokens = noise(), 3000
    needed = one.largest_excess / ((2 - DRIFT) * MEAN)
    submissions = int(2 * needed / tokens)
    most = sums(2 * MEAN, workers=1000, submissions=submissions, tokens=tokens)
    assert (most > one.largest_excess).mean() > 0.99
    # while in each of its submissions it passes
    assert one.largest_mean(tokens) > 3 * MEAN
