"""Who is connected: a bounded number of connections, none of which waits for nothing.

aiohttp speaks HTTP on each; here they are counted and ended. A connection is idle while no request
on it is being answered: before the first one, while half a head is there, while the last answer is
not taken. It may be for `IDLE_S`. Where there are too many, the one that has been idle longest
makes room, so that nobody locks others out by being connected, and the process never runs out of
files. What is being answered has bounds of its own: of the body, of long polls, of what is sent.
"""

from __future__ import annotations

import asyncio
import logging
import resource
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web
from aiohttp.web_request import BaseRequest

from verify.coordinator.server import MAX_HEADER_BYTES

_log = logging.getLogger(__name__)

MAX_CONNECTIONS = 8192
IDLE_S = 75.0
"""Longer than a reverse proxy (60 s) keeps a connection for its next request."""
LINGER_S = 10.0
"""How long the rest of a body that nobody reads is taken, so that its sender reads the answer."""
MAX_HEADERS = 64
_ACCEPTED_AT_ONCE = 128
_FILES_BESIDE = 1024
"""Open files beside the connections: the ledger, uploads, what is accepted before another ends."""
_FULL_EVERY_S = 10.0

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Connection(web.RequestHandler):
    """One connection: idle, or a request on it is being answered."""

    def __init__(self, all_: Connections, server: web.Server) -> None:
        super().__init__(
            server,
            loop=asyncio.get_running_loop(),
            keepalive_timeout=2 * all_.idle_s,  # never waited for: the timer here is quicker
            access_log=None,  # type: ignore[arg-type]  # its own default, and what turns it off
            max_headers=MAX_HEADERS,
            max_field_size=MAX_HEADER_BYTES,
            lingering_time=LINGER_S,
            auto_decompress=False,  # a body is the bytes that were signed, never larger ones
        )
        self._all = all_
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._all.came(self)

    def connection_lost(self, exc: BaseException | None) -> None:
        self.answers()
        self._all.left(self)
        super().connection_lost(exc)

    def waits(self, seconds: float) -> None:
        """Is idle from now on, and ends when it has been for so long."""
        self.answers()
        self._timer = asyncio.get_running_loop().call_later(seconds, self.end)

    def answers(self) -> None:
        """Is not idle any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def handle_error(
        self,
        request: BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """As aiohttp's, but a malformed request, body included, is no fault of ours."""
        if status >= 500 and not isinstance(exc, web.RequestPayloadError):
            return super().handle_error(request, status, exc, message)
        response = web.Response(status=400, text="malformed request\n")
        response.force_close()
        return response

    def end(self) -> None:
        """Disconnects at once, unsent bytes or not."""
        self._all.left(self)
        if self.transport is not None:
            self.transport.abort()


class Connections:
    """Makes the connections of one server, and knows which are idle."""

    def __init__(self) -> None:
        self._most, self.idle_s = possible_connections(MAX_CONNECTIONS), IDLE_S
        self._open: set[Connection] = set()
        self._idle: dict[Connection, None] = {}
        """In the order in which they became idle."""
        self._told = -_FULL_EVERY_S

    def __len__(self) -> int:
        return len(self._open)

    async def listen(self, server: web.Server, host: str, port: int) -> asyncio.Server:
        """Lets connections in.

        Args:
            server: aiohttp's, whose application has `answering` among its middlewares.
            host, port: where to listen.

        Raises:
            OSError: the address cannot be had.
        """
        return await asyncio.get_running_loop().create_server(
            lambda: Connection(self, server), host, port, backlog=_ACCEPTED_AT_ONCE
        )

    @web.middleware
    async def answering(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        """Around the answer to each request."""
        connection: Any = request.protocol
        connection.answers()
        self._idle.pop(connection, None)
        try:
            return await handler(request)
        finally:
            if connection in self._open:
                self._waits(connection)

    def came(self, connection: Connection) -> None:
        """A new one; where there are too many, one of the idle ends: it, if it is the only one."""
        self._open.add(connection)
        self._waits(connection)
        if len(self._open) > self._most:
            now = asyncio.get_running_loop().time()
            if now >= self._told + _FULL_EVERY_S:
                self._told = now
                _log.warning("%d connections are open: the longest idle make room", self._most)
            next(iter(self._idle)).end()

    def left(self, connection: Connection) -> None:
        self._open.discard(connection)
        self._idle.pop(connection, None)

    def _waits(self, connection: Connection) -> None:
        self._idle.pop(connection, None)
        self._idle[connection] = None
        connection.waits(self.idle_s)


def possible_connections(wanted: int) -> int:
    """How many connections this process may have, after asking for as many files as it may open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = wanted + _FILES_BESIDE
    allowed = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    if soft != resource.RLIM_INFINITY and soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
        soft = allowed
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return wanted
    possible = max(soft // 2, soft - _FILES_BESIDE)
    _log.warning(
        "%d open files are allowed: at most %d connections, not %d (`ulimit -Hn`)",
        *(soft, possible, wanted),
    )
    return possible
