"""What a spec may say of a pool and no worker can do is refused by name, before vLLM starts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from runspec.core.errors import UserError
from sampler.engine.arguments import find_pool
from sampler.engine.engine import Engine
from tests.sampler.engine.models import MAX_MODEL_LEN
from tests.verify.small_model import small_spec


def test_a_quantised_pool_on_cpus_is_refused() -> None:
    pool = small_spec(dtype="bfloat16", quantization="fp8").samplers[0]

    with pytest.raises(UserError, match="does not quantise to fp8 on CPUs") as error:
        Engine(pool)

    assert error.value.place == "samplers.home.quantization"


@pytest.mark.slow
def test_what_vllm_refuses_is_said_in_its_words(untied, new_engine) -> None:
    engine = new_engine(quantization="nonsense")

    with pytest.raises(UserError, match=r"vLLM refuses.*(.|\n)*nonsense") as error:
        engine.load(untied, 0)

    assert error.value.place == str(untied)


def test_a_pool_that_is_not_in_the_spec_is_named_with_those_that_are() -> None:
    with pytest.raises(UserError, match="no sampler pool 'away'") as error:
        find_pool(small_spec(), "away")

    assert "home" in error.value.remedy


@pytest.mark.slow
def test_an_engine_whose_cache_has_no_room_for_one_sequence_names_the_pools_length(
    new_engine: Callable[..., Engine], untied: Path
) -> None:
    # given an engine whose cache is too small, which vLLM alone knows
    engine = new_engine(num_gpu_blocks_override=2)
    # when it starts, then the place is the pool's and the words are vLLM's
    with pytest.raises(UserError, match=rf"max seq len \({MAX_MODEL_LEN}\)") as error:
        engine.load(untied, 0)
    assert error.value.place == "samplers.cpu.max_model_len"
