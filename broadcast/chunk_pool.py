"""Threads that bring chunks over kept-alive connections, each under a deadline."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from broadcast.connection import Connection, Stale, Transfer, connect
from broadcast.http1 import Address, request
from broadcast.transport import Access, Fault, TooSlow

THREADS = 16
"""At most so many chunks come at a time."""
_IDLE_S = 30.0
"""After which an unused connection is closed; servers have their own limit, often a minute."""
_LOOK_EVERY_S = 0.5


class ChunkPool:
    """Brings chunks for one event loop, which it never blocks.

    Args:
        access: token and certificates for every server asked.
        threads: that work at most; who asks for more at a time waits (within its own timeout).
    """

    def __init__(self, access: Access, threads: int = THREADS) -> None:
        self._headers = access.headers()
        self._tls = access.ssl_context
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="chunk")
        self._idle: defaultdict[Address, list[Connection]] = defaultdict(list)
        self._expiry: dict[Connection, asyncio.TimerHandle] = {}

    async def fetch(
        self,
        url: str,
        path: str,
        transfer: Transfer,
        *,
        timeout_s: float,
        is_hopeless: Callable[[float], bool] = lambda elapsed_s: False,
    ) -> None:
        """Brings one chunk from one server; afterwards no thread touches the file any more.

        Args:
            url: the server's base URL.
            path: of the chunk, below it.
            transfer: what to bring and where to.
            timeout_s: for all of it, so that an endless drip ends too.
            is_hopeless: asked now and then with the seconds gone by; True ends it.

        Raises:
            NotThere, Busy, Lie, TooSlow, Fault: what came instead.
            OSError: the file cannot be written.
        """
        address = Address.of(url)
        asked = request(address, path, self._headers)
        started = time.monotonic()

        def give_up() -> bool:
            return is_hopeless(time.monotonic() - started)

        try:
            async with asyncio.timeout(timeout_s):
                while (idle := self._take(address)) is not None:
                    with suppress(Stale):  # closed since its last use: no fault, another will do
                        return await self._over(idle, asked, transfer, give_up)
                fresh = await connect(address, self._tls)
                return await self._over(fresh, asked, transfer, give_up)
        except TimeoutError as error:
            raise Fault(
                f"{transfer.received} of {transfer.chunk.size} bytes within {timeout_s:.1f} s"
            ) from error

    def close(self) -> None:
        """Closes the idle connections; nothing may be under way."""
        for connection in list(self._expiry):
            self._drop(connection)
        self._threads.shutdown(wait=False)

    async def _over(
        self,
        connection: Connection,
        asked: bytes,
        transfer: Transfer,
        give_up: Callable[[], bool],
    ) -> None:
        """Has a thread work on the connection, and keeps that for the next chunk if it is good."""
        loop = asyncio.get_running_loop()
        work = loop.run_in_executor(self._threads, connection.bring, asked, transfer)
        try:
            while not (await asyncio.wait([work], timeout=_LOOK_EVERY_S))[0]:
                if give_up():
                    raise TooSlow(f"{transfer.received} of {transfer.chunk.size} bytes so far")
            again = work.result()
        except BaseException:
            connection.end()
            try:
                await _outlast(work)
            finally:
                connection.close()
            raise
        if again:
            self._keep(connection)
        else:
            connection.close()

    def _take(self, address: Address) -> Connection | None:
        """A connection that is open as far as one can see; the one used last."""
        while self._idle[address]:
            connection = self._idle[address].pop()
            self._expiry.pop(connection).cancel()
            if connection.is_idle():
                return connection
            connection.close()
        return None

    def _keep(self, connection: Connection) -> None:
        self._idle[connection.address].append(connection)
        loop = asyncio.get_running_loop()
        self._expiry[connection] = loop.call_later(_IDLE_S, self._drop, connection)

    def _drop(self, connection: Connection) -> None:
        self._idle[connection.address].remove(connection)
        self._expiry.pop(connection).cancel()
        connection.close()


async def _outlast(work: asyncio.Future[bool]) -> None:
    """Waits for a thread that was told to end: at most for one write to the disk.

    However often we are cancelled meanwhile, for until then it may write to the file.
    """
    cancelled = None
    while not work.done():
        try:
            await asyncio.wait([work])
        except asyncio.CancelledError as error:
            cancelled = error
    work.exception()  # what it made of that is nobody's concern
    if cancelled is not None:
        raise cancelled
