"""What a fetch says while it takes long: how far it is, how fast, and who sends."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping

EVERY_S = 5.0
"""Seconds between two lines in the log."""


class Progress:
    """Counts the bytes that came.

    Args:
        what: is being fetched.
        total: bytes to come.
        received: bytes that each server has sent so far, over its whole life.
        log: told every few seconds.
    """

    def __init__(
        self,
        what: str,
        total: int,
        received: Callable[[], Mapping[str, int]],
        log: logging.Logger,
    ) -> None:
        self._what, self._total, self._received, self._log = what, total, received, log
        self._done = self._done_before = 0
        self._at = time.monotonic()
        self._from = dict(received())

    def add(self, size: int) -> None:
        self._done += size

    async def report(self) -> None:
        """Says it again and again until it is cancelled."""
        while True:
            await asyncio.sleep(EVERY_S)
            self._log.info("%s", self.line())

    def line(self) -> str:
        """What happened since the last call."""
        now, received = time.monotonic(), dict(self._received())
        rate = (self._done - self._done_before) / max(now - self._at, 1e-9)
        sent = {url: n - self._from.get(url, 0) for url, n in received.items()}
        shares = ", ".join(
            f"{url} {n / sum(sent.values()):.0%}"
            for url, n in sorted(sent.items(), key=lambda item: -item[1])
            if n > 0
        )
        self._done_before, self._at, self._from = self._done, now, received
        left_s = (self._total - self._done) / rate if rate > 0 else None
        return (
            f"{self._what}: {self._done / 1e6:,.1f} of {self._total / 1e6:,.1f} MB, "
            f"{rate / 1e6:,.1f} MB/s"
            + (f", {left_s:,.0f} s left" if left_s is not None else "")
            + (f", from {shares}" if shares else ", from no server just now")
        )
