"""What vLLM is told, for each kind of hardware."""

from __future__ import annotations

from pathlib import Path

import pytest

from runspec.core.errors import UserError
from sampler.engine.arguments import engine_arguments, prepare_environment
from tests.sampler.engine.conftest import cpu_pool

GPU = {"kind": "h100-80g", "count": 4}
TPU = {"kind": "tpu-v5e", "topology": "2x2"}


def test_a_gpu_pool_sizes_its_cache_by_itself_and_takes_any_shape(untied: Path) -> None:
    pool = cpu_pool(hardware=GPU, parallel={"tensor": 2, "data": 2}, dtype="bfloat16")

    arguments = engine_arguments(pool, untied, {})

    assert arguments["tensor_parallel_size"] == 2
    assert arguments["data_parallel_size"] == 2
    assert arguments["dtype"] == "bfloat16"
    assert arguments["distributed_executor_backend"].__name__ == "ManyRanks"
    assert "kv_cache_memory_bytes" not in arguments
    assert "block_size" not in arguments


def test_a_quantised_gpu_pool_says_so(untied: Path) -> None:
    pool = cpu_pool(hardware=GPU, dtype="bfloat16", quantization="fp8")

    assert engine_arguments(pool, untied, {})["quantization"] == "fp8"


def test_one_gpu_runs_in_the_core_itself(untied: Path) -> None:
    arguments = engine_arguments(cpu_pool(hardware={"kind": "h100-80g"}), untied, {})

    assert arguments["distributed_executor_backend"].__name__ == "OneRank"


def test_a_tpu_keeps_its_own_executor(untied: Path) -> None:
    arguments = engine_arguments(cpu_pool(hardware=TPU, parallel={"tensor": 4}), untied, {})

    assert "distributed_executor_backend" not in arguments
    assert arguments["tensor_parallel_size"] == 4


def test_a_cpu_pool_gets_a_cache_of_a_size(untied: Path) -> None:
    arguments = engine_arguments(cpu_pool(), untied, {})

    assert arguments["kv_cache_memory_bytes"] >= 64 << 20
    assert arguments["block_size"] == 32


@pytest.mark.parametrize("hardware", [GPU, TPU, {"kind": "cpu"}])
def test_vllm_takes_the_arguments(untied: Path, hardware: dict[str, object]) -> None:
    prepare_environment()
    from vllm.engine.arg_utils import AsyncEngineArgs

    arguments = AsyncEngineArgs(**engine_arguments(cpu_pool(hardware=hardware), untied, {}))

    assert arguments.enable_prefix_caching
    assert arguments.enforce_eager


def test_options_replace_what_is_chosen(untied: Path) -> None:
    assert engine_arguments(cpu_pool(), untied, {"max_num_seqs": 3})["max_num_seqs"] == 3


def test_a_cache_without_room_for_one_sequence_is_refused(untied: Path) -> None:
    with pytest.raises(UserError, match="keys and values of one sequence") as error:
        engine_arguments(cpu_pool(), untied, {"kv_cache_memory_bytes": 1 << 10})

    assert error.value.place == "samplers.cpu.max_model_len"
