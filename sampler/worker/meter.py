"""What a worker tells of its work: cumulative, so that a lost heartbeat loses nothing."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager


class Meter:
    """Seconds of sampling and tokens sampled since the process began. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._started = time.monotonic()
        self._busy_s = 0.0
        self._busy_since: float | None = None
        self._tokens = 0
        self._version = -1

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Counts the time of the block, also while it still runs."""
        with self._lock:
            self._busy_since = time.monotonic()
        try:
            yield
        finally:
            with self._lock:
                self._busy_s += time.monotonic() - self._busy_since
                self._busy_since = None

    def add_tokens(self, count: int) -> None:
        with self._lock:
            self._tokens += count

    def set_version(self, version: int) -> None:
        with self._lock:
            self._version = version

    def state(self) -> dict[str, int | float]:
        """The heartbeat: `version` (-1 before the first), `busy_s`, `tokens`, `uptime_s`."""
        with self._lock:
            now = time.monotonic()
            running = 0.0 if self._busy_since is None else now - self._busy_since
            return {
                "version": self._version,
                "busy_s": self._busy_s + running,
                "tokens": self._tokens,
                "uptime_s": now - self._started,
            }
