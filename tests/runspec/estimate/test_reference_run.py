"""The timeline against the published figures of INTELLECT-2 (docs/plan.md)."""

from __future__ import annotations

import pytest

from benchmarks.reference_run import (
    Inputs,
    Published,
    broadcast,
    error,
    flops,
    predict,
)

PUBLISHED = Published()


def test_the_fleet_fitted_on_target_short_predicts_target_long() -> None:
    _, short, long = predict(Inputs(), PUBLISHED)

    assert short.first_rollouts == pytest.approx(PUBLISHED.first_rollouts, rel=1e-3)
    assert short.full == pytest.approx(PUBLISHED.full_short, rel=1e-3)
    assert abs(error(long.full, PUBLISHED.full_long)) < 0.15


def test_the_broadcast_takes_what_was_published() -> None:
    assert abs(broadcast(PUBLISHED)["error"]) < 0.01


def test_compute_held_for_inference_is_near_the_published_share() -> None:
    fit, _, _ = predict(Inputs(), PUBLISHED)

    held = flops(Inputs(), fit, PUBLISHED)["held"]

    assert held == pytest.approx(PUBLISHED.inference_flops, rel=0.15)
