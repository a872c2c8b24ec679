"""Imports what the fork server of `sampler.engine.processes` has imported."""

from __future__ import annotations

import gc
import importlib

import setproctitle

from sampler.engine.arguments import prepare_environment

_MODULES = (
    "vllm.model_executor.models.llama",
    "vllm.model_executor.models.qwen2",
    "vllm.model_executor.models.qwen3",
    "vllm.v1.attention.backends.cpu_attn",
    "vllm.v1.engine.async_llm",
    "vllm.v1.engine.core",
    "vllm.v1.worker.cpu_worker",
    "sampler.engine.worker_extension",
)

setproctitle.getproctitle()  # must run before the environment changes: it locates the title by it
prepare_environment()
gc.disable()  # collecting garbage among modules, which stay, takes a fifth of the import's time
for _name in _MODULES:
    importlib.import_module(_name)
gc.freeze()
gc.enable()
