from __future__ import annotations

import json
from statistics import fmean, stdev

import pytest

from runspec.estimate.run import draws, estimate_run
from tests.runspec.estimate.shipped import shipped

FLEET = ("samplers.volunteers.replicas=12",)


def test_the_shipped_spec_has_every_figure() -> None:
    spec, config = shipped(*FLEET, "samplers.volunteers.hardware.price_per_hour=2.0")

    estimate = estimate_run(spec, config)

    assert estimate.unknown == ()
    assert estimate.timeline is not None and estimate.run_s is not None
    assert estimate.cost is not None
    assert estimate.cost.per_hour == 12 * 4 * 2.0
    assert estimate.cost.run == pytest.approx(96.0 * estimate.run_s / 3600)
    assert estimate.run_s == pytest.approx(300 * estimate.timeline.step_s, rel=0.1)


def test_keys_are_stable_and_everything_is_json() -> None:
    spec, config = shipped(*FLEET, "samplers.volunteers.hardware.price_per_hour=2.0")

    data = json.loads(json.dumps(estimate_run(spec, config).to_json(), allow_nan=False))

    keys = (
        "parameters learner samplers version_bytes follower_bytes joiner_bytes arrivals validators "
        "validator_tokens_per_s timeline steps fill_deadline_s run_s cost assumed unknown "
        "supervised islands"
    )
    assert set(data) == set(keys.split())
    assert set(data["learner"]) == {"devices", "device_memory", "memory", "flops", "step_s"}
    assert data["learner"]["memory"]["total"] > data["learner"]["memory"]["masters"] > 0
    assert {"kv_tokens", "full_sequences"} <= set(data["samplers"][0]["memory"])
    keys = "step_s idle first_rollouts_s full_s start_s lag filled_share gains intervals bottleneck"
    assert set(data["timeline"]) == set(keys.split())
    assert set(data["timeline"]["idle"]) == {"learner", "broadcast", "volunteers", "validators"}
    assert set(data["assumed"][0]) == {"name", "value", "unit", "source"}


def test_speeds_that_nobody_knows_are_named() -> None:
    spec, config = shipped(
        "learner.hardware.peak_flops=null",
        "samplers.volunteers.tokens_per_s=null",
        "verify.tokens_per_s=null",
        profile="laptop",
    )

    estimate = estimate_run(spec, config)

    assert estimate.unknown == (
        "learner.hardware.peak_flops",
        "samplers.volunteers.tokens_per_s",
        "verify.tokens_per_s",
    )
    assert estimate.timeline is None
    assert estimate.learner.memory is not None


def test_every_input_says_where_it_is_from() -> None:
    spec, config = shipped(
        *FLEET,
        "estimate.mean_new_tokens=5000",
        "samplers.volunteers.hardware.memory_bandwidth=2e12",
        "algorithm.filters.zero_variance=false",
    )

    found = {
        entry.name: (entry.value, entry.source) for entry in estimate_run(spec, config).assumed
    }

    assert found["mean new tokens"] == (5000.0, "estimate.mean_new_tokens")
    assert found["mean prompt tokens"] == (512.0, "0.25 of data.max_prompt_tokens")
    assert found["h100-80g bandwidth"] == (2e12, "samplers.volunteers.hardware.memory_bandwidth")
    assert found["h100-80g peak"] == (989e12, "table of h100-80g")
    assert found["tpu-v5p peak"] == (459e12, "table of tpu-v5p")
    assert found["filtered share"] == (0.0, "algorithm.filters: none is on")
    assert found["link"] == (590e6, "samplers.volunteers.download")
    assert found["a validator"][1] == "verify.hardware"
    spec, config = shipped("verify.hardware=null")
    sources = {entry.name: entry.source for entry in estimate_run(spec, config).assumed}
    assert sources["a validator"] == "no verify.hardware: as a replica of volunteers"


def test_more_volunteers_shorten_a_step_until_the_learner_is_what_it_takes() -> None:
    steps = []
    for replicas in (4, 16, 128):
        spec, config = shipped(
            f"samplers.volunteers.replicas={replicas}", "samplers.volunteers.download=10Gbit/s"
        )
        estimate = estimate_run(spec, config)
        assert estimate.timeline is not None
        steps.append((estimate.timeline.step_s, estimate.timeline.bottleneck))

    assert steps[0][0] > steps[1][0] > steps[2][0]
    assert steps[0][1] == "volunteers"
    assert steps[2] == (pytest.approx(estimate.learner.step_s), "learner")


def test_lengths_have_the_mean_and_spread_asked_for() -> None:
    lengths, filtered = draws(
        seed=3, group_size=16, mean=6000.0, spread=0.6, longest=1e9, filtered_share=0.25
    )
    groups = [(step, group) for step in range(20) for group in range(100)]

    drawn = [length for step, group in groups for length in lengths(step, group)]

    assert fmean(drawn) == pytest.approx(6000.0, rel=0.02)
    assert stdev(drawn) / fmean(drawn) == pytest.approx(0.6, rel=0.05)
    assert fmean(filtered(step, group) for step, group in groups) == pytest.approx(0.25, abs=0.03)
