"""What a case may take: processor time, and memory."""

from __future__ import annotations

import resource
import sys
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

OPEN = ExitStack()
"""Folders and servers that the cases of a lane share; whoever runs lanes closes it."""
CPU_S = 5.0
"""A thousand times what the slowest case takes, and far below what would stall a server."""
_UNUSED = 32 << 20
"""What an allocator may take of the system beyond what it was asked for."""


class Watch:
    """Of cases that are not `traced`, which costs system calls and more: of each the time by the
    clock, of all of them since the last look the memory and, where one took long, its own time."""

    def __init__(self) -> None:
        self.traced = True
        self._allowed = self._most = 0
        self._cpu_s = 0.0

    def look(self) -> None:
        """Fails where a case since the last look took more memory than its bound."""
        grown = _most() - self._most
        assert not self._most or grown < self._allowed + _UNUSED, f"{grown} bytes"
        self._most, self._cpu_s = _most(), time.thread_time()

    @contextmanager
    def bounded(self, memory: int) -> Iterator[None]:
        """As `bounded`."""
        self._allowed = max(self._allowed, memory)
        begun = time.perf_counter()
        yield
        if time.perf_counter() - begun > CPU_S:  # most of it may be others' on a busy machine
            assert time.thread_time() - self._cpu_s < CPU_S


WATCH = Watch()


@contextmanager
def bounded(memory: int) -> Iterator[None]:
    """Fails a case that takes more than CPU_S seconds of its thread or more bytes than `memory`."""
    if not WATCH.traced:
        with WATCH.bounded(memory):
            yield
        return
    tracemalloc.start()
    begun = time.thread_time()
    try:
        yield
        spent, peak = time.thread_time() - begun, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert spent < CPU_S
    assert peak < memory


def _most() -> int:
    """Bytes of memory that this process has had at most."""
    if sys.platform != "linux":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # There `ru_maxrss` begins at what the parent had when it started the process.
    words = Path("/proc/self/status").read_text().split()
    return int(words[words.index("VmHWM:") + 1]) * 1024
