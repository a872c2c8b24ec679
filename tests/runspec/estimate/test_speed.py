from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runspec.core.models.flops import step_flops
from runspec.estimate.speed import (
    Decode,
    decode_speed,
    learner_seconds,
    mean_tokens,
    validator_tokens_per_s,
)
from tests.runspec.estimate.shipped import shipped

LENGTHS = st.lists(st.floats(1, 5000), min_size=1, max_size=40)
DECODES = st.builds(
    Decode,
    weights_s=st.floats(1e-4, 0.1),
    context_s=st.floats(0, 1e-5),
    token_s=st.floats(0, 1e-3),
    sequences=st.integers(1, 50),
)


def test_keys_and_values_are_read_at_the_mean_context() -> None:
    decode = Decode(weights_s=0.0, context_s=1e-6, token_s=0.0, sequences=64)

    # 10 sequences grow from 50 to 150 tokens of context in 100 steps.
    assert decode.lease_seconds([100.0] * 10, prompt=50.0) == pytest.approx(100 * 10 * 100 * 1e-6)


def test_a_measured_rate_is_all_there_is_to_it() -> None:
    spec, config = shipped("samplers.volunteers.tokens_per_s=500")

    decode = decode_speed(spec.samplers[0], spec, config)

    assert decode is not None
    assert decode.lease_seconds([700.0, 300.0], prompt=1e9) == 2.0
    assert decode.tokens_per_s([700.0, 300.0], prompt=1e9) == 500.0


@settings(deadline=None)
@given(DECODES, LENGTHS, st.floats(0, 1000))
def test_a_lease_takes_no_less_than_either_roof(
    decode: Decode, lengths: list[float], prompt: float
) -> None:
    seconds = decode.lease_seconds(lengths, prompt)

    flops = (sum(lengths) + len(lengths) * prompt) * decode.token_s
    assert seconds >= max(lengths) * decode.weights_s * (1 - 1e-9)
    assert seconds >= flops * (1 - 1e-9)


def test_a_roofline_by_hand() -> None:
    spec, config = shipped("estimate.sampler_bandwidth=0.5", "estimate.sampler_mfu=0.5")

    decode = decode_speed(spec.samplers[0], spec, config)

    assert decode is not None
    # 65.5 GB over four devices of 3.35 TB/s, half of which is reached.
    assert decode.weights_s == pytest.approx(65.53e9 / 4 / (3.35e12 / 2), rel=1e-3)
    assert decode.context_s == 65536 / (3.35e12 / 2)
    # 32.0e9 parameters in matrices and the head, on four devices of 989 TFLOP/s.
    assert decode.token_s == pytest.approx(2 * 31.98e9 / (4 * 989e12 / 2), rel=1e-3)


def test_the_learner_takes_its_flops_at_its_mfu() -> None:
    spec, config = shipped("estimate.learner_mfu=0.5")
    flops = step_flops(spec, config, mean_tokens(spec))

    seconds = learner_seconds(spec, config)

    assert seconds == pytest.approx(
        (flops.useful + flops.old + flops.reference) / (64 * 459e12 * 0.5)
    )


def test_a_validator_prefills_at_two_flops_a_parameter() -> None:
    spec, config = shipped(
        "verify.hardware={kind: h100-80g, count: 2}",
        "estimate.sampler_mfu=0.5",
        "estimate.mean_new_tokens=1",
        "estimate.mean_prompt_tokens=1",
    )

    rate = validator_tokens_per_s(spec, config)

    assert rate == pytest.approx(2 * 989e12 / 2 / (2 * 31.98e9), rel=1e-3)
