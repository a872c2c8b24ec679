"""Processes that end with the one that starts them, however that ends.

vLLM's processes wait for messages for ever when their front is killed (SIGKILL leaves it no time to
say so). A process of `multiprocessing` holds one end of a pipe whose other end closes with its
parent: a thread waits for that, from before the first line of vLLM's runs.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from multiprocessing import context
from multiprocessing.process import BaseProcess
from types import SimpleNamespace


class Guarded(BaseProcess):
    """Is killed as soon as its parent is gone; stands before a context's own class of processes."""

    def run(self) -> None:
        parent = multiprocessing.parent_process()
        assert parent is not None

        def wait() -> None:
            parent.join()
            os.kill(os.getpid(), signal.SIGKILL)

        threading.Thread(target=wait, name="die-with-parent", daemon=True).start()
        super().run()


class _Process(Guarded, context.SpawnProcess):
    """A spawned one."""


class Spawned(context.SpawnContext):
    """The context of `multiprocessing` that spawns guarded processes."""

    Process = _Process


def in_vllm(start: context.BaseContext) -> SimpleNamespace:
    """What stands in `vllm.utils.system_utils` for the module `multiprocessing`, so that vLLM's
    processes start in a context of ours."""
    return SimpleNamespace(get_context=lambda method: start)


SPAWNED = in_vllm(Spawned())
