"""A thread that does one thing after the other beside the worker's loop."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from sampler.worker.lease_state import Event


class Background:
    """Runs what it is given in order, and reports what comes of each. Ends with the process.

    Args:
        name: of the thread.
        report: gets what the work returns, on that thread.
    """

    def __init__(self, name: str, report: Callable[[Event], None]) -> None:
        self._report = report
        self._queue: queue.SimpleQueue[Callable[[], Event]] = queue.SimpleQueue()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def add(self, work: Callable[[], Event]) -> None:
        """Queues a piece of work, which bounds its own time and raises nothing."""
        self._queue.put(work)

    def _run(self) -> None:
        while True:
            self._report(self._queue.get()())
