"""Imports what the fork server of `sampler.engine.processes` preloads; ends with the worker."""

from __future__ import annotations

import atexit
import gc
import importlib
import os
import signal

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

signal.signal(signal.SIGTERM, signal.SIG_IGN)  # for the worker's group: the worker may still sample
setproctitle.getproctitle()  # it finds the title's place by the environment as it was at the start
prepare_environment()
gc.disable()  # modules stay: looking for garbage in them was a fifth of the import's time
for _name in _MODULES:
    importlib.import_module(_name)
gc.freeze()
gc.enable()
atexit.register(os._exit, 0)  # libraries would list what else there is
