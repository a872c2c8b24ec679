"""What the fork server of `tests.preloaded` imports; processes below its own use it too."""

from __future__ import annotations

import gc
from multiprocessing import forkserver

import sampler.engine.executors
import sampler.engine.preload
import sampler.worker.start
from sampler.engine.forked import FORKED

__all__ = ["sampler"]

gc.freeze()
sampler.engine.executors.RANKS = FORKED
forkserver.ensure_running = lambda: None
forkserver._forkserver.ensure_running = forkserver.ensure_running  # type: ignore[attr-defined]
