"""A server that is told to end in the moment in which its address is known."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Coroutine
from typing import Any

DEADLINE_S = 30.0


def hears_sigterm_at_once(
    server: Callable[[Callable[[int], None]], Coroutine[Any, Any, None]],
) -> bool:
    """Runs a server, of a callback for its port, and sends this process SIGTERM from there.

    Returns:
        Whether it was the server that heard it.

    Raises:
        TimeoutError: it serves on.
    """
    unheard: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: unheard.append(number))
    try:
        running = server(lambda port: os.kill(os.getpid(), signal.SIGTERM))
        asyncio.run(asyncio.wait_for(running, DEADLINE_S))
    finally:
        signal.signal(signal.SIGTERM, before)
    return not unheard
