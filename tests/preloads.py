"""What the fork server of `tests.preloaded` imports; processes below its own use it too."""

from __future__ import annotations

import atexit
import gc
import importlib
import os
from multiprocessing import forkserver

from sampler.engine.arguments import prepare_environment
from tests.preloaded import IN_VLLM

MODULES = (
    "vllm.model_executor.models.llama",
    "vllm.model_executor.models.qwen2",
    "vllm.model_executor.models.qwen3",
    "vllm.v1.attention.backends.cpu_attn",
    "vllm.v1.engine.async_llm",
    "vllm.v1.engine.core",
    "vllm.v1.worker.cpu_worker",
    "sampler.engine.executors",
    "sampler.engine.seeded",
    "sampler.engine.worker_extension",
    "sampler.worker.start",
    "vllm.utils.system_utils",
)

prepare_environment()
gc.disable()
for name in MODULES:
    module = importlib.import_module(name)
gc.freeze()
gc.enable()
module.multiprocessing = IN_VLLM  # type: ignore[attr-defined]
forkserver._forkserver.ensure_running = lambda: None  # type: ignore[attr-defined]
atexit.register(os._exit, 0)  # libraries would list on stderr what they leave behind
