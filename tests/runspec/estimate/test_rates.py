"""Times of a step where nobody waits, from measured rates, by hand."""

from __future__ import annotations

import pytest

from runspec.core.models.spec_model import model_config
from runspec.core.spec.schema import RunSpec
from runspec.estimate.speed import (
    learner_seconds,
    rollouts_per_step,
    sampling_seconds,
    step_seconds,
    tokens_to_check,
)
from tests.runspec.core.spec.spec_files import FLEET, load


def fleet(*overrides: str) -> RunSpec:
    spec = load(FLEET, *overrides).spec
    assert spec is not None
    return spec


def test_pools_share_the_rollouts_of_a_step() -> None:
    # given two replicas of one pool and one of another, 5,000 tokens/s together
    other = "{trust: trusted, hardware: {kind: mine}, max_model_len: 34816, max_new_tokens: 32768, "
    spec = fleet(
        "samplers.pool={tokens_per_s: 1000, replicas: 2}",
        f"samplers.other={other}tokens_per_s: 3000}}",
        "estimate.mean_new_tokens=5000",
    )
    # then 256 groups of 16 rollouts of 5,000 tokens take them 4,096 s
    assert sampling_seconds(spec, model_config(spec)) == pytest.approx(256 * 16 * 5000 / 5000)


def test_a_step_lasts_as_long_as_its_slower_side() -> None:
    slow, fast = fleet("samplers.pool.tokens_per_s=100"), fleet("samplers.pool.tokens_per_s=1e9")
    config = model_config(slow)
    assert step_seconds(slow, config) == sampling_seconds(slow, config)
    assert step_seconds(fast, config) == learner_seconds(fast, config)


@pytest.mark.parametrize(
    ("filtered", "sampled"), [(0.0, 4096), (0.5, 8192), (0.9, 16384), (1.0, 16384)]
)
def test_filtered_groups_are_sampled_again_up_to_max_groups(filtered: float, sampled: int) -> None:
    spec = fleet(f"estimate.filtered_share={filtered}", "algorithm.fill.max_groups=4.0")
    assert rollouts_per_step(spec) == pytest.approx(sampled)


def test_validators_prefill_prompt_and_output_of_their_share() -> None:
    spec = fleet(
        "estimate={mean_new_tokens: 5000, mean_prompt_tokens: 500}", "verify.prefill_share=0.25"
    )
    assert tokens_to_check(spec) == pytest.approx(4096 * 5500 / 4)
