"""What a case may take: processor time, and memory of Python's and numpy's."""

from __future__ import annotations

import os
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager

from hypothesis import settings

from tests.fuzz.campaign import campaign

costly = settings(campaign, max_examples=int(os.environ.get("FUZZ_CASES", "200")))
"""A campaign whose cases take milliseconds: fewer of them in `make test`."""
CPU_S = 5.0
"""A thousand times what the slowest case takes, and far below what would stall a server."""


@contextmanager
def bounded(memory: int) -> Iterator[None]:
    """Fails a case that takes more than CPU_S seconds of its thread or more bytes than `memory`."""
    tracemalloc.start()
    begun = time.thread_time()
    try:
        yield
        spent, peak = time.thread_time() - begun, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert spent < CPU_S
    assert peak < memory
