"""Processes of vLLM's that end with the one that started them, however that ends.

vLLM's engine core waits for messages for ever when its front is killed (SIGKILL leaves it no time
to say so). A process that `multiprocessing` spawned holds one end of a pipe whose other end closes
with its parent: a thread waits for that.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading


def die_with_parent() -> None:
    """From now on this process is killed as soon as the one that spawned it is gone."""
    parent = multiprocessing.parent_process()
    if parent is None:
        raise RuntimeError("no process of multiprocessing's")

    def wait() -> None:
        parent.join()
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=wait, name="die-with-parent", daemon=True).start()


def ignore_interrupts() -> None:
    """Ctrl-C reaches every process of the terminal: the front decides what becomes of this one."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
