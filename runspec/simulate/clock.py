"""A virtual clock: actions in order of time, of equal times in the order in which they came."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from math import inf


class Clock:
    """Seconds since version 0 was published, and what is to happen."""

    def __init__(self) -> None:
        self.now = 0.0
        self._count = 0
        self._actions: list[tuple[float, int, Callable[[], None]]] = []

    def at(self, time: float, action: Callable[[], None]) -> None:
        """Runs an action at a time, which may be infinite: never."""
        if time < inf:
            heapq.heappush(self._actions, (max(time, self.now), self._count, action))
            self._count += 1

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        """Runs an action some seconds from now."""
        self.at(self.now + seconds, action)

    @property
    def next(self) -> float:
        """When the next action is; infinite where there is none."""
        return self._actions[0][0] if self._actions else inf

    def run_next(self) -> None:
        """Goes to the next action and runs it."""
        self.now, _, action = heapq.heappop(self._actions)
        action()
