"""What takes long to make and is asked for often: made for many, not for each."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")

LONG_S = 0.02
"""What takes less is made anew each time."""
SHARE = 0.05
"""Of the time, that making may take at most, however often it is asked for."""


class Kept(Generic[T]):
    """The last one made is given out until making the next would take more than `SHARE`.

    Args:
        make: makes one.
        clock: seconds, never going back.
    """

    def __init__(self, make: Callable[[], T], clock: Callable[[], float] = time.monotonic) -> None:
        self._make, self._clock = make, clock
        self._kept: tuple[float, T] | None = None
        """Until when, and what."""

    def get(self) -> T:
        """A new one, or the last."""
        begun = self._clock()
        if self._kept is not None and begun < self._kept[0]:
            return self._kept[1]
        self._kept = None
        made = self._make()
        took = self._clock() - begun
        if took > LONG_S:
            self._kept = begun + took / SHARE, made
        return made
