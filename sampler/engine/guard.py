"""Processes of vLLM's that end with the one that started them, however that ends.

vLLM's engine core waits for messages for ever when its front is killed (SIGKILL leaves it no time
to say so). A process that `multiprocessing` spawned holds one end of a pipe whose other end closes
with its parent: a thread waits for that.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import signal
import threading
import time
from pathlib import Path

from sampler.engine.sockets import remove_inherited

CORE_NAME = "EngineCore"
"""What vLLM's names of engine cores begin with, as `multiprocessing` has them."""
COORDINATOR = b"VLLM::DPCoordinator"
"""What the process calls itself that vLLM starts beside data-parallel cores, before these. Nothing
of ours runs in it, so the cores take it along."""


_LOOK_S = 0.05
_beside: list[int] = []


def guard_from_the_start() -> None:
    """In an engine core: `die_with_parent`, called before it starts vLLM, which takes seconds."""
    if multiprocessing.current_process().name.startswith(CORE_NAME):
        _wait_for_parent()


def die_with_parent() -> None:
    """From now on this process, and a coordinator beside it, are killed as soon as the one that
    spawned them is gone."""
    if multiprocessing.parent_process() is None:
        raise RuntimeError("no process of multiprocessing's")
    _beside[:] = _named_children(os.getppid(), COORDINATOR)  # the server's, where it was forked
    _wait_for_parent()


@functools.cache
def _wait_for_parent() -> None:
    """Starts the thread that waits, once."""

    def wait() -> None:
        while (parent := multiprocessing.parent_process()) is None:
            time.sleep(_LOOK_S)  # it is known once this process has its arguments
        parent.join()
        for pid in _beside:
            if _is_named(pid, COORDINATOR):  # and not a later process of the same number
                os.kill(pid, signal.SIGKILL)
        remove_inherited()
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=wait, name="die-with-parent", daemon=True).start()


def ignore_interrupts() -> None:
    """Ctrl-C reaches every process of the terminal: the front decides what becomes of this one."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _named_children(parent: int, name: bytes) -> list[int]:
    """Children of a process that call themselves so; none where there is no /proc."""
    pids = (int(path.name) for path in Path("/proc").glob("[0-9]*"))
    return [pid for pid in pids if _is_named(pid, name) and _parent(pid) == parent]


def _parent(pid: int) -> int | None:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return None


def _is_named(pid: int, name: bytes) -> bool:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().startswith(name)
    except (FileNotFoundError, ProcessLookupError):
        return False
