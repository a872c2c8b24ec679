"""A cache without room for one sequence, as vLLM finds where it measures the memory itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from runspec.core.errors import UserError
from sampler.engine.engine import Engine
from tests.sampler.engine.models import MAX_MODEL_LEN

pytestmark = pytest.mark.slow
GIB = 2**30


def test_an_engine_whose_cache_has_no_room_for_one_sequence_names_the_pools_length(
    new_engine: Callable[..., Engine], untied: Path
) -> None:
    # given an engine whose cache is too small, which vLLM alone knows
    engine = new_engine(num_gpu_blocks_override=2)
    # when it starts, then the place is the pool's and the words are vLLM's
    with pytest.raises(UserError, match=rf"max seq len \({MAX_MODEL_LEN}\)") as error:
        engine.load(untied, 0)
    assert error.value.place == "samplers.cpu.max_model_len"
