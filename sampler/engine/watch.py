"""A watch over engine cores: while outputs are awaited, they are asked for a sign of life.

An output may take however long a sequence is, so it has no deadline; a core that hangs (a kernel
that never ends, a process that was stopped) would be waited for as long as the worker lives.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

ASK_S = 10.0
"""From an answer to the next question. One is a message to the core and one back."""
SILENCE_S = 600.0
"""How long a core may leave a question unanswered: it answers between two steps, and after a call
that is under way, of which none may take longer."""


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
