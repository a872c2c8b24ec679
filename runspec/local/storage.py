"""How long a supervisor waits for a disk that is full, or for a database that is locked."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from runspec.core.errors import NotNow

T = TypeVar("T")
AGAIN_S = 1.0


class StorageWait:
    """Tries again what cannot be written just now.

    Args:
        patience_s: how long it tries, in seconds; 0 tries once.
        tell: is told that a wait begins, and that it is over.
        stop_requests: how many times the run was asked to stop; it waits no longer then.
    """

    def __init__(
        self,
        patience_s: float = 0.0,
        tell: Callable[[str], None] = lambda text: None,
        stop_requests: Callable[[], int] = lambda: 0,
    ) -> None:
        self._patience_s, self._tell, self._stop_requests = patience_s, tell, stop_requests
        self._since: float | None = None
        """When the first attempt failed after the last that did not."""

    def __call__(self, attempt: Callable[[], T]) -> T:
        """Return what `attempt` returns, once it does not fail.

        Raises:
            NotNow: the patience is over or the run was asked to stop, and it failed again.
        """
        while True:
            try:
                done = attempt()
            except NotNow as error:
                if self._since is None:
                    self._since = time.monotonic()
                    self._tell(
                        f"waits up to {self._patience_s:.0f} s: {error.place}: {error.thing}"
                    )
                waited = time.monotonic() - self._since
                if self._stop_requests() or waited >= self._patience_s:
                    raise
                time.sleep(AGAIN_S)
                continue
            if self._since is not None:
                self._tell(f"goes on after {time.monotonic() - self._since:.0f} s")
                self._since = None
            return done
