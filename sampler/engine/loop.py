"""An asyncio event loop on a thread of its own, for callers that block."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Loop:
    """Runs coroutines of any thread's on one thread. Ends with the process, or at `close`."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    @property
    def closed(self) -> bool:
        return self._loop.is_closed()

    def run(self, work: Coroutine[Any, Any, T], timeout_s: float | None = None) -> T:
        """Waits for a coroutine, which has deadlines of its own.

        Raises:
            TimeoutError: it is not through in time, perhaps because another holds the loop.
        """
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout_s)

    def soon(self, action: Callable[[], object]) -> None:
        """Calls a function on the loop, after what was asked for before."""
        self._loop.call_soon_threadsafe(action)

    def close(self, timeout_s: float) -> None:
        """Ends the loop once what was cancelled has ended.

        Raises:
            TimeoutError: that takes too long.
        """
        self.run(_settle(), timeout_s)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _settle() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
