"""State of an open lease, events of the worker's loop, and its background thread."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from sampler.engine.requests import Sampled
from sampler.worker.rollouts import PlannedRollout
from sampler.worker.schedule import OpenLease
from verify.formats.lease import Lease


@dataclass
class HeldLease(OpenLease):
    """A lease and the state of its sampling; only the loop's thread changes it."""

    lease: Lease
    plan: Sequence[PlannedRollout]
    future: Future[list[Sampled]] | None = None
    """Result of its sampling; a new one if it is sampled again."""
    deaths: int = 0
    """Engines that died while they sampled it."""
    since: float = field(default_factory=time.monotonic)
    """When its sampling began."""


@dataclass(frozen=True)
class Granted:
    """The coordinator granted a lease, and its version is on this machine."""

    lease: Lease
    digest: str
    plan: Sequence[PlannedRollout]


@dataclass(frozen=True)
class NotGranted:
    """There is no lease now, or the request failed."""

    error: BaseException | None = None


@dataclass(frozen=True)
class SamplingEnded:
    """The engine has ended the sampling of a lease, with a result or an error."""

    digest: str
    future: Future[list[Sampled]]


@dataclass(frozen=True)
class Settled:
    """A lease was submitted or refused, or its submission failed."""

    digest: str
    error: BaseException | None = None


Event = Granted | NotGranted | SamplingEnded | Settled


class Background:
    """A thread that runs work in order and reports the event of each piece. Ends with the process.

    Args:
        name: of the thread.
        report: receives what the work returns, on that thread.
    """

    def __init__(self, name: str, report: Callable[[Event], None]) -> None:
        self._report = report
        self._queue: queue.SimpleQueue[Callable[[], Event]] = queue.SimpleQueue()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def add(self, work: Callable[[], Event]) -> None:
        """Queue a piece of work, which limits its own time and raises nothing."""
        self._queue.put(work)

    def _run(self) -> None:
        while True:
            self._report(self._queue.get()())
