"""Ctrl-C and its kin, counted: the first asks the roles to end, the second kills them."""

from __future__ import annotations

import signal
from types import FrameType
from typing import Any

EXIT_INTERRUPTED = 130


class StopSignals:
    """Counts Ctrl-C, SIGTERM and a closed terminal instead of dying of them, inside `with`."""

    _NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def __init__(self) -> None:
        self._count = 0
        self._before: dict[signal.Signals, Any] = {}
        self.last = ""
        """Name of the newest."""

    def __call__(self) -> int:
        """How many have come."""
        return self._count

    def __enter__(self) -> StopSignals:
        self._before = {stop: signal.signal(stop, self._note) for stop in self._NUMBERS}
        return self

    def __exit__(self, *error: object) -> None:
        for stop, handler in self._before.items():
            signal.signal(stop, handler)

    def _note(self, stop: int, frame: FrameType | None) -> None:
        self._count += 1
        self.last = signal.Signals(stop).name
