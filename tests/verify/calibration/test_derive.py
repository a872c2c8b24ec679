"""From measurements to limits: never looser unasked, never below the floor."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest

from tests.verify.profiles import made_profile
from verify.calibration.derive import FLOOR, derive
from verify.calibration.measure import Measurements
from verify.checks.prefill import judge_gaps
from verify.profile import looser_than_published
from verify.thresholds import BFLOAT16, Limits

ROLLOUTS = 400


def measured(scale: float = 1.0, **values: np.ndarray) -> Measurements:
    """Numbers as bfloat16 has them, times a scale; keyword arguments take their place."""
    rng = np.random.default_rng(0)
    found = {
        "logprob_submission": rng.normal(0.006, 0.0003, 60) * scale,
        "logprob_rollout": rng.normal(0.006, 0.001, ROLLOUTS) * scale,
        "gap": rng.exponential(0.002, ROLLOUTS) * scale,
        "gap_max": rng.exponential(0.002, ROLLOUTS) * scale,
        "mismatch_share": np.minimum(rng.poisson(2, ROLLOUTS) * scale, 128) / 128,
        "miss_share 8": np.minimum(rng.poisson(2, ROLLOUTS) * scale, 128) / 128,
        "miss_share 32": np.minimum(rng.poisson(1, ROLLOUTS) * scale, 128) / 128,
        "mantissa_mean": rng.normal(2.0, 0.2, ROLLOUTS) * scale,
        "mantissa_median": rng.poisson(0.3, ROLLOUTS) * scale,
        **values,
    }
    rows = {key: each.tolist() for key, each in found.items()}
    gaps = [
        (rng.exponential(0.015, 300) * (rng.random(300) < 0.004) * scale).astype(np.float32)
        for _ in range(ROLLOUTS)
    ]
    return Measurements(defaultdict(list, rows), gaps, submissions=60, rollouts=ROLLOUTS)


def limits_of(
    found: Measurements, *, rate: float = 1e-6, allow_looser: bool = False
) -> tuple[Limits, list[str]]:
    derived = derive(found, BFLOAT16, rate=rate, allow_looser=allow_looser)
    return derived.limits, derived.looser


def test_a_quiet_pool_gets_tighter_limits() -> None:
    limits, looser = limits_of(measured())
    assert looser == [] == looser_than_published(limits, BFLOAT16)
    for name in ("logprob_submission", "logprob_rollout", "mismatch_share"):
        assert getattr(limits, name) < getattr(BFLOAT16, name), name
    # tau is more than a gap: it stays, and tails have their exceptions
    assert (limits.gap, limits.gap_share) == (0.1, 0.01)
    assert limits.gap_max == pytest.approx(0.3)
    assert limits.constant_ratio == BFLOAT16.constant_ratio
    # and of many tokens a tenth of the published mean gap is left, of a few it is the published
    assert limits.gap_mean == BFLOAT16.gap_mean
    assert limits.gap_noise is not None
    assert limits.gap_noise.largest_mean(30_000) < 0.2 * BFLOAT16.gap_mean
    assert limits.gap_noise.largest_mean(300) > BFLOAT16.gap_mean


def test_one_gap_that_no_rollout_had_rejects_nobody() -> None:
    # given rollouts whose largest gap was far below tau, as of hidden size 64 in bfloat16
    limits, _ = limits_of(measured())
    # when one token of another is above it, as 6 of a million were, then it passes
    gaps = np.zeros(300, np.float32)
    gaps[7] = 0.2035
    assert judge_gaps(gaps, limits).passed
    # and two more, or a larger one, do not
    gaps[7] = 0.31
    assert not judge_gaps(gaps, limits).passed
    gaps[:4] = 0.2
    assert not judge_gaps(gaps, limits).passed


def test_a_noisy_pool_keeps_the_published_limits_unless_told_otherwise() -> None:
    noisy = measured(8.0, mantissa_median=np.random.default_rng(6).poisson(0.3, ROLLOUTS))
    limits, looser = limits_of(noisy)
    assert looser == [] == looser_than_published(limits, BFLOAT16)
    assert limits.logprob_rollout == BFLOAT16.logprob_rollout
    # when looser ones are allowed
    limits, looser = limits_of(noisy, allow_looser=True)
    assert "logprob_rollout" in looser
    assert set(looser_than_published(limits, BFLOAT16)) <= set(looser)
    assert limits.logprob_rollout > max(noisy.values["logprob_rollout"])


def test_no_limit_undercuts_the_floor() -> None:
    limits, _ = limits_of(measured(1e-6))
    assert limits.logprob_rollout == FLOOR.logprob_rollout
    assert limits.mismatch_share >= FLOOR.mismatch_share
    assert limits.mantissa_mean == FLOOR.mantissa_mean


def test_a_profile_says_the_limit_that_is_judged_by() -> None:
    # given too few submissions for a bound of their own, and misses whose bound is above that of
    # mismatches
    rng = np.random.default_rng(7)
    found = measured(
        logprob_submission=np.full(8, 0.006),
        mismatch_share=rng.binomial(128, 0.005, ROLLOUTS) / 128,
        **{"miss_share 8": rng.binomial(128, 0.01, ROLLOUTS) / 128},
    )
    derived = derive(found, BFLOAT16, rate=1e-6, allow_looser=False)
    limits, numbers = derived.limits, derived.numbers
    # then what rollouts and mismatches may have is their limit, and the profile says so
    assert limits.logprob_submission == limits.logprob_rollout < BFLOAT16.logprob_submission
    assert numbers["logprob_submission"].limit == limits.logprob_submission
    assert numbers["logprob_submission"].note == "that of logprob_rollout"
    assert numbers["miss_share"].bound > limits.miss_share == limits.mismatch_share
    assert numbers["miss_share"].limit == limits.miss_share
    assert numbers["miss_share"].note == "that of mismatch_share"


def test_unseeded_pools_keep_the_limits_of_gaps() -> None:
    found = measured()
    for name in ("gap", "gap_max"):
        del found.values[name]
    found.gaps.clear()
    limits, _ = limits_of(found)
    assert (limits.gap, limits.gap_share, limits.gap_max) == (0.1, 0.01, 2.0)
    assert (limits.gap_mean, limits.gap_noise) == (BFLOAT16.gap_mean, None)


def test_a_profile_cannot_hide_that_it_is_looser() -> None:
    profile = made_profile(sampler={"precision": "bfloat16"})
    loose = profile.limits.model_copy(update={"gap_mean": 1.0})
    hidden = profile.model_copy(update={"limits": loose})
    assert looser_than_published(hidden.as_limits(), BFLOAT16) == ["gap_mean"]
