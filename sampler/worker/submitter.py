"""Hands submissions in behind the sampling: the next leases sample while the last one travels."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

from verify.client import SubmissionRefused


class Submitter:
    """One thread that finishes leases in order; the coordinator bounds how many are open.

    Args:
        log: told of refused submissions.
        done: told the digest of each lease that is dealt with, on that thread.
    """

    def __init__(self, log: logging.Logger, done: Callable[[str], None] = lambda lease: None):
        self._log, self._done = log, done
        self._queue: queue.SimpleQueue[tuple[str, Callable[[], None]]] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._open: set[str] = set()
        self._failure: BaseException | None = None
        threading.Thread(target=self._work, name="submit", daemon=True).start()

    def add(self, lease: str, finish: Callable[[], None]) -> None:
        """Queues the rest of a lease's work.

        Args:
            lease: its digest.
            finish: makes the submission and hands it in; bounds its own time.
        """
        with self._changed:
            self._open.add(lease)
        self._queue.put((lease, finish))

    def check(self) -> None:
        """Raises what a submission failed with, a `RunFinished` included."""
        if self._failure is not None:
            raise self._failure

    def drain(self, timeout_s: float) -> bool:
        """Waits, no longer than `timeout_s` seconds, until nothing is open; whether that came."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._open, timeout_s)

    def _work(self) -> None:
        while True:
            lease, finish = self._queue.get()
            try:
                finish()
            except SubmissionRefused as error:
                self._log.warning("submission refused, going on: %s", error)
            except BaseException as error:  # noqa: BLE001 - raised again by `check`
                self._failure = self._failure or error
            with self._changed:
                self._open.discard(lease)
                self._changed.notify_all()
            self._done(lease)
