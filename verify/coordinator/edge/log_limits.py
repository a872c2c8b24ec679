"""Limits the log lines that strangers can cause, so that a flood does not fill the disk.

The client reads why its request was refused; the log needs only some of these lines.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from verify.coordinator.edge.limiter import Limiter, Name

LOGGERS = ("verify.coordinator.server", "aiohttp.server")
"""They log refusals and malformed requests, which anybody can cause."""


class LineLimit(logging.Filter):
    """Drops a logger's lines beyond a rate; the next line says how many were dropped."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._limiter, self._clock, self._dropped = Limiter(), clock, 0

    def filter(self, record: logging.LogRecord) -> bool:
        if self._limiter.take(Name("all", "log line"), now=self._clock()) > 0.0:
            self._dropped += 1
            return False
        if self._dropped:
            record.msg = f"{record.msg} ({self._dropped} lines before this one were dropped)"
            self._dropped = 0
        return True


@contextmanager
def limited_log() -> Iterator[None]:
    """Limit the lines of `LOGGERS` within the block."""
    filters = {logging.getLogger(name): LineLimit() for name in LOGGERS}
    for logger, one in filters.items():
        logger.addFilter(one)
    try:
        yield
    finally:
        for logger, one in filters.items():
            logger.removeFilter(one)
