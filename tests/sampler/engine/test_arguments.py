"""What vLLM is told, for each kind of hardware."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from runspec.core.errors import UserError
from sampler.engine.arguments import engine_arguments, prepare_environment
from tests.sampler.engine.conftest import cpu_pool

GPU = {"kind": "h100-80g", "count": 4}
TPU = {"kind": "tpu-v5e", "topology": "2x2"}


@pytest.mark.parametrize(
    ("fields", "executor", "cache", "eager"),
    [
        ({}, "OneRank", True, True),
        ({"enforce_eager": False}, "OneRank", True, False),
        ({"hardware": {"kind": "h100-80g"}}, "OneRank", False, False),
        ({"hardware": {"kind": "h100-80g"}, "enforce_eager": True}, "OneRank", False, True),
        ({"hardware": {"kind": "any"}}, "OneRank", False, False),
        ({"hardware": GPU, "parallel": {"tensor": 2, "data": 2}}, "ManyRanks", False, False),
        ({"hardware": GPU, "dtype": "bfloat16", "quantization": "fp8"}, "OneRank", False, False),
        ({"hardware": TPU, "parallel": {"tensor": 4}}, None, False, False),
    ],
    ids=str,
)
def test_each_hardware_has_its_executor_and_graphs_and_cpus_a_cache_of_a_size(
    untied: Path, fields: dict[str, Any], executor: str | None, cache: bool, eager: bool
) -> None:
    pool = cpu_pool(**fields)
    arguments = engine_arguments(pool, untied, {})

    assert arguments["tensor_parallel_size"] == pool.parallel.tensor
    assert arguments["data_parallel_size"] == pool.parallel.data
    assert (arguments["dtype"], arguments["quantization"]) == (pool.dtype, pool.quantization)
    made = arguments.get("distributed_executor_backend")
    assert (made and made.__name__) == executor
    assert ("kv_cache_memory_bytes" in arguments, "block_size" in arguments) == (cache, cache)
    prepare_environment()
    from vllm.engine.arg_utils import AsyncEngineArgs

    assert AsyncEngineArgs(**arguments).enforce_eager is eager


def test_a_cache_without_room_for_one_sequence_is_refused(untied: Path) -> None:
    with pytest.raises(UserError, match="keys and values of one sequence") as error:
        engine_arguments(cpu_pool(), untied, {"kv_cache_memory_bytes": 1 << 10})

    assert error.value.place == "samplers.cpu.max_model_len"
