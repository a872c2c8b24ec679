"""Arguments of vLLM: from a pool of the spec to `AsyncEngineArgs`, for each kind of hardware."""

from __future__ import annotations

import json
import logging
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from runspec.core.entry_points import NO_TPU_SAMPLER
from runspec.core.errors import UserError
from runspec.core.models.family import load_config
from runspec.core.models.parameters import (
    CPU_BLOCK_TOKENS,
    MAX_SEQUENCES,
    cpu_kv_bytes,
    kv_token_bytes,
)
from runspec.core.process import RunStopped
from runspec.core.schema import RunSpec, SamplerPool

_ENVIRONMENT = {
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # threads and CUDA do not survive a fork
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # the runner that CPUs have: one interface everywhere
    "VLLM_LOGGING_LEVEL": "ERROR",  # its warnings are about choices made here; loads are checked
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}

_NO_ROOM = ("KV cache is needed, which is larger", "No available memory for the cache blocks")
"""Parts of vLLM's messages if the memory beside the weights is not enough for one sequence."""


def prepare_environment() -> None:
    """Set the environment variables that vLLM reads at import, and its log level.

    Variables that are set already stay.
    """
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    logging.getLogger("vllm").setLevel(os.environ["VLLM_LOGGING_LEVEL"])
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"vllm\.")


def engine_arguments(
    pool: SamplerPool, weights_dir: Path, options: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the arguments of `AsyncEngineArgs` for a pool.

    Args:
        pool: dtype, quantization, eager or graphs, context length, parallelism and hardware come
            from here.
        weights_dir: the first version.
        options: override the arguments chosen here.

    Raises:
        RunStopped: on a CPU, the KV cache has no room for one sequence; on a TPU, always.
    """
    kind = pool.hardware.kind
    if kind.startswith("tpu"):
        raise RunStopped(
            f"{kind}: {NO_TPU_SAMPLER}",
            place=f"samplers.{pool.name}.hardware.kind",
            remedy="sample on CPUs or GPUs",
        )
    from sampler.engine.worker_extension import ManyRanks, OneRank

    arguments: dict[str, Any] = {
        "model": str(weights_dir),
        "dtype": pool.dtype,
        "quantization": pool.quantization,
        "max_model_len": pool.max_model_len,
        "tensor_parallel_size": pool.parallel.tensor,
        "data_parallel_size": pool.parallel.data,
        "max_num_seqs": MAX_SEQUENCES,
        "enforce_eager": kind == "cpu" if pool.enforce_eager is None else pool.enforce_eager,
        "enable_prefix_caching": True,  # a group shares its prompt; salted by load
        "skip_tokenizer_init": True,  # tokens in, tokens out
        "generation_config": "vllm",  # ignore the model's own temperature and top-p
        "hf_overrides": {"head_dtype": "float32"},  # logits unrounded, as the learner's are
        "logits_processors": ["sampler.engine.worker_extension:SeededSampler"],
        "worker_extension_cls": "sampler.engine.worker_extension.SamplerExtension",
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
    }
    if kind == "cpu":
        arguments["block_size"] = CPU_BLOCK_TOKENS
        arguments["kv_cache_memory_bytes"] = cpu_kv_bytes(pool, load_config(weights_dir))
    executor = OneRank if pool.parallel.tensor == 1 else ManyRanks
    arguments["distributed_executor_backend"] = executor
    arguments |= options
    if kind == "cpu":  # without room for one sequence it would wait for ever
        block = int(arguments["block_size"])
        tokens = (-(-int(arguments["max_model_len"]) // block) + 1) * block  # vLLM keeps one empty
        needed = tokens * int(kv_token_bytes(pool, load_config(weights_dir)))
        given = int(arguments["kv_cache_memory_bytes"])
        if given < needed:
            raise RunStopped(
                f"keys and values of one sequence take {needed / 1e6:.2f} MB, the cache has "
                f"{given / 1e6:.2f}",
                place=f"samplers.{pool.name}.max_model_len",
                remedy="lower it, or use more tensor-parallel ranks",
            )
    return arguments


def register_model_class(weights_dir: Path) -> None:
    """Register the class that config.json names in vLLM's registry; an unknown one is left to vLLM.

    Otherwise vLLM starts a process that imports all of vLLM to inspect the class, so that a process
    that may fork does not initialise CUDA. On CPUs there is no CUDA.
    """
    from vllm.model_executor.models.registry import ModelRegistry

    config = json.loads((weights_dir / "config.json").read_text())
    for name in config.get("architectures") or ():
        registered = ModelRegistry.models.get(name)
        if registered is not None:
            ModelRegistry.register_model(name, registered.load_model_cls())


def find_pool(spec: RunSpec, name: str) -> SamplerPool:
    """Return the pool of the spec by its name.

    Raises:
        UserError: there is no pool of that name.
    """
    pools = {pool.name: pool for pool in spec.samplers}
    if name not in pools:
        raise UserError(
            f"no sampler pool {name!r}",
            place="--pool",
            remedy=f"the spec has: {', '.join(sorted(pools))}",
        )
    return pools[name]


def kv_cache_error(exit_reason: str, pool: SamplerPool) -> UserError | None:
    """Return the error of a core whose KV cache had no room for one sequence; None for others.

    Args:
        exit_reason: message of vLLM.
    """
    if not any(words in exit_reason for words in _NO_ROOM):
        return None
    return UserError(
        f"the cache of keys and values has no room for one sequence: {exit_reason}",
        place=f"samplers.{pool.name}.max_model_len",
        remedy="lower it, or use more tensor-parallel ranks, or a GPU with more memory",
    )
