"""What the fork server of `tests.preloaded` imports; processes below its own use it too."""

from __future__ import annotations

import gc
from multiprocessing import forkserver

import sampler.engine.preload  # noqa: F401 - for whoever forks
import sampler.engine.worker_extension
import sampler.worker
from sampler.engine.processes import FORKED

__all__ = ["sampler"]

gc.freeze()
sampler.engine.worker_extension.RANKS = FORKED
forkserver.ensure_running = lambda: None
forkserver._forkserver.ensure_running = forkserver.ensure_running  # type: ignore[attr-defined]
