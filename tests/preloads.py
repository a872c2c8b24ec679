"""What the fork server of `tests.preloaded` imports; processes below its own use it too."""

from __future__ import annotations

import gc
from multiprocessing import forkserver

import vllm.utils.system_utils

import sampler.engine.preload
import sampler.worker.start
from sampler.engine.forked import IN_VLLM

__all__ = ["sampler"]

gc.freeze()
vllm.utils.system_utils.multiprocessing = IN_VLLM
forkserver.ensure_running = lambda: None
forkserver._forkserver.ensure_running = forkserver.ensure_running  # type: ignore[attr-defined]
