"""What happened in the last seconds, in bounded memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable


class Recent:
    """Keys noted within the last `for_s` seconds; of more than `limit` the oldest are forgotten."""

    def __init__(
        self, for_s: float, *, limit: int = 1024, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._for_s, self._limit, self._clock = for_s, limit, clock
        self._noted: dict[Hashable, float] = {}

    def note(self, key: Hashable) -> None:
        self._noted.pop(key, None)  # so that the order is that of the times
        self._noted[key] = self._clock()
        while len(self._noted) > self._limit:
            del self._noted[next(iter(self._noted))]

    def __contains__(self, key: Hashable) -> bool:
        at = self._noted.get(key)
        return at is not None and self._clock() - at < self._for_s
