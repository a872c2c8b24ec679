"""A cache without room for one sequence, as vLLM finds where it measures the memory itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from runspec.core.errors import UserError
from sampler.engine.arguments import lack_of_room
from sampler.engine.engine import Engine
from tests.sampler.engine.conftest import cpu_pool
from tests.sampler.engine.models import MAX_MODEL_LEN

pytestmark = pytest.mark.slow
GIB = 2**30


@pytest.mark.parametrize("available", [0, GIB])
def test_what_vllm_says_of_too_little_memory_names_the_pools_length(available: int) -> None:
    from vllm.v1.core.kv_cache_utils import _check_enough_kv_cache_memory

    # given what vLLM itself raises where weights leave too little memory, or none
    with pytest.raises(ValueError, match=r"cache") as raised:
        _check_enough_kv_cache_memory(available, lambda: 2 * GIB, 4096, lambda _: 2048)
    # when it is the cause of a core's end
    error = lack_of_room(f"ValueError: {raised.value}", cpu_pool())
    # then the message names what to lower
    assert error is not None
    assert error.place == "samplers.cpu.max_model_len"
    assert str(raised.value) in str(error)


def test_an_engine_whose_cache_has_no_room_for_one_sequence_names_the_pools_length(
    new_engine: Callable[..., Engine], untied: Path
) -> None:
    # given an engine whose cache is too small, which vLLM alone knows
    engine = new_engine(num_gpu_blocks_override=2)
    # when it starts, then the place is the pool's and the words are vLLM's
    with pytest.raises(UserError, match=rf"max seq len \({MAX_MODEL_LEN}\)") as error:
        engine.load(untied, 0)
    assert error.value.place == "samplers.cpu.max_model_len"
