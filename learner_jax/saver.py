"""Checkpoints are written while training goes on: one at a time, in the background."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait

from runspec.core.errors import UserError

REPORT_EVERY_S = 15.0
DEADLINE_S = 3600.0
"""How long one checkpoint may take."""

Finish = Callable[[], None]
"""The part of a save that touches no device: write, take digests, rename, drop what is old."""


class Saver:
    """Runs the saves of a run, at most one at a time; leaving its block waits for the last one.

    Args:
        log: told of waits.
    """

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="save")
        self._save: Future[None] | None = None
        self._what = ""

    def run(self, what: str, begin: Callable[[], Finish]) -> None:
        """Begins a save, once the one before is written.

        Args:
            what: names it in messages.
            begin: copies arrays to the host, on this thread; what it returns runs on another.

        Raises:
            UserError: the save before this one failed.
        """
        self.wait()
        self._what, self._save = what, self._thread.submit(begin())

    def wait(self) -> None:
        """Returns when nothing is being written.

        Raises:
            UserError: it could not be written, or not in time.
        """
        begun = time.monotonic()
        while self._save is not None:
            if wait([self._save], REPORT_EVERY_S).done:
                save, self._save = self._save, None
                save.result()
                return
            waited = time.monotonic() - begun
            if waited > DEADLINE_S:
                self._save = None  # given up: no later call waits for it
                raise UserError(
                    f"{self._what} is not written after {waited:.0f} s",
                    remedy="see whether the disk is full or slow, then start again",
                )
            self._log.info("%s: still being written after %.0f s", self._what, waited)

    def __enter__(self) -> Saver:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if error is None:
            self.wait()
        elif isinstance(error, UserError):
            try:
                self.wait()
            except UserError as second:  # the first is the one to raise
                self._log.error("%s", second)
        self._thread.shutdown(wait=False)
