"""An asyncio event loop on a thread of its own, for callers that block; and a watch on it.

An output may take however long a sequence is, so it has no deadline. While outputs are awaited,
engine cores are asked for a sign of life: one that hangs (a kernel that never ends, a process that
was stopped) would be waited for as long as the worker lives.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")
ASK_S = 10.0
"""From an answer to the next question. One is a message to the core and one back."""
SILENCE_S = 600.0
"""How long a core may leave a question unanswered: it answers between two steps, and after a call
that is under way, of which none may take longer."""


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


class Watch:
    """A context manager around each wait for an output; asks as long as there is one.

    Args:
        ask: asks every core, and sees to it that a silent one is given up.
    """

    def __init__(self, ask: Callable[[], Awaitable[None]]) -> None:
        self._ask = ask
        self._waiting = 0
        self._task: asyncio.Task[None] | None = None

    def __enter__(self) -> None:
        self._waiting += 1
        if self._task is None:
            self._task = asyncio.ensure_future(self._run())

    def __exit__(self, *error: object) -> None:
        self._waiting -= 1
        if not self._waiting and self._task is not None:
            self._task.cancel()
            self._task = None

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(ASK_S)
            await self._ask()
