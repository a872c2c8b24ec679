"""The timeline against the published figures of INTELLECT-2 (docs/plan.md)."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from benchmarks.reference_run import (
    LONG,
    SHORT,
    VARIED,
    WHY,
    Inputs,
    Published,
    broadcast,
    error,
    flops,
    load,
    predict,
    targets_of,
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


def test_every_assumed_input_is_explained_and_its_effect_shown() -> None:
    assert set(WHY) == set(asdict(Inputs()))
    assert set(asdict(Inputs())) - set(VARIED) == {"sampler_bandwidth", "learner_mfu"}


def test_the_lengths_are_those_of_the_shipped_specs() -> None:
    assert targets_of(load("target_short")) == SHORT
    assert targets_of(load("target_long")) == LONG
