"""What a spec may say of a pool and no worker can do is refused by name, before vLLM starts."""

from __future__ import annotations

import pytest

from runspec.common.errors import UserError
from sampler.engine.engine import Engine
from sampler.worker.worker import find_pool
from tests.verify.small_model import small_spec


def test_a_quantised_pool_on_cpus_is_refused() -> None:
    pool = small_spec(dtype="bfloat16", quantization="fp8").samplers[0]

    with pytest.raises(UserError, match="does not quantise to fp8 on CPUs") as error:
        Engine(pool)

    assert error.value.place == "samplers.home.quantization"


@pytest.mark.parametrize(
    ("fields", "place"),
    [
        ({"sampling": {"top_p": 0.9}}, "samplers.home.sampling"),
        ({"in_flight_updates": True, "trust": "trusted"}, "samplers.home.in_flight_updates"),
    ],
)
def test_a_worker_does_not_start_on_what_it_cannot_do(
    fields: dict[str, object], place: str
) -> None:
    with pytest.raises(UserError) as error:
        find_pool(small_spec(**fields), "home")

    assert error.value.place == place


def test_a_pool_that_is_not_in_the_spec_is_named_with_those_that_are() -> None:
    with pytest.raises(UserError, match="no sampler pool 'away'") as error:
        find_pool(small_spec(), "away")

    assert "home" in error.value.remedy
