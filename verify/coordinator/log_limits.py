"""How many lines strangers can have written to the log: a flood of requests must not fill the disk.

Refused and malformed requests are told to who makes them; the log needs some of them, not all.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from verify.coordinator.rates import Buckets, Rate

LINES = Rate(1.0, 200)
"""Of each of the loggers below; a day's are some 60 MB at most."""
OF_STRANGERS = ("verify.coordinator.server", "aiohttp.server")
"""What these log, anybody can cause: refusals, and requests that aiohttp cannot read."""


class Sparing(logging.Filter):
    """Leaves out what comes too often, and says with the next line how many lines that was."""

    def __init__(self, rate: Rate, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._rate, self._clock = rate, clock
        self._bucket, self._left_out = Buckets(1), 0

    def filter(self, record: logging.LogRecord) -> bool:
        if self._bucket.take("lines", self._rate, self._clock()) > 0.0:
            self._left_out += 1
            return False
        if self._left_out:
            record.msg = f"{record.msg} ({self._left_out} lines before it were left out)"
            self._left_out = 0
        return True


@contextmanager
def spared() -> Iterator[None]:
    """Spares the log of what strangers cause, within the block."""
    filters = {logging.getLogger(name): Sparing(LINES) for name in OF_STRANGERS}
    for logger, one in filters.items():
        logger.addFilter(one)
    try:
        yield
    finally:
        for logger, one in filters.items():
            logger.removeFilter(one)
