"""Cache for expensive responses that many clients request."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")

LONG_S = 0.02
"""A value that takes less time to compute is not cached."""
SHARE = 0.05
"""Largest share of the time that computing may take, however often the value is requested."""


class Cache(Generic[T]):
    """Repeats the last value until computing the next one would take more than `SHARE`.

    Args:
        compute: returns a new value.
        clock: seconds, never going back.
    """

    def __init__(
        self, compute: Callable[[], T], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._compute, self._clock = compute, clock
        self._last: tuple[float, T] | None = None
        """Time until which the value is repeated, and the value."""

    def get(self) -> T:
        """Return the last value, or a new one."""
        started = self._clock()
        if self._last is not None and started < self._last[0]:
            return self._last[1]
        self._last = None
        value = self._compute()
        took = self._clock() - started
        if took > LONG_S:
            self._last = started + took / SHARE, value
        return value
