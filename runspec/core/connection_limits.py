"""Limits how many connections a server has open, and closes idle ones.

aiohttp speaks HTTP on each connection; this module accepts, counts and closes them. A connection is
busy while a request on it is answered. Else it is idle: before a request, during a TLS handshake,
while a head or a small body arrives, while the client reads the last answer. When the limit is
reached, the connection that is idle for longest is closed in favour of the new one. So idle clients
lock nobody out, and the process does not run out of files. Busy connections are never closed for a
new one: the application limits them (long polls, uploads, downloads).
"""

from __future__ import annotations

import asyncio
import functools
import logging
import resource
import socket
import ssl
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import cast

from aiohttp import web
from aiohttp.web_request import BaseRequest

MAX_HEADERS = 64
_TLS_SHUTDOWN_S = 2.0
_ACCEPTED_AT_ONCE = 16
_PAUSE_S = 0.1
_TURNS_TO_CLOSE = 5
"""Turns of the event loop between the end of a TLS connection's bytes and that of its socket."""
_FULL = b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nContent-Length: 0\r\n\r\n"

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True)
class ConnectionLimits:
    """Limits of a server's connections and of the request heads on them."""

    connections: int
    """Connections open at once."""
    idle_s: float
    """Seconds between two requests of a connection."""
    head_s: float
    """Seconds a request's head may take to arrive, and a TLS handshake may last."""
    header_bytes: int
    """Largest size of one header."""
    line_bytes: int = 8190
    """Largest size of a request's first line."""
    linger_s: float = 0.0
    """Seconds for which the rest of an unread body is received, so that its sender reads the
    answer."""


class Observer:
    """Receives what happens to connections, for metrics and logs; by itself it drops all of it."""

    def dropped(self, why: str) -> None:
        """A connection was closed: late head, idle, room, full or TLS."""

    def malformed(self, status: int) -> None:
        """A malformed request was answered with this status; anybody can cause any number."""


class Connection(web.RequestHandler):
    """One connection, which is busy or idle."""

    def __init__(self, limiter: ConnectionLimiter, server: web.Server) -> None:
        limits = limiter.limits
        super().__init__(
            server,
            loop=asyncio.get_running_loop(),
            keepalive_timeout=2 * limits.idle_s,  # never reached: `_close_after` is earlier
            access_log=None,  # type: ignore[arg-type]  # its own default, and what turns it off
            max_line_size=limits.line_bytes,
            max_headers=MAX_HEADERS,
            max_field_size=limits.header_bytes,
            lingering_time=limits.linger_s,
            auto_decompress=False,  # a body is the bytes that were sent, never larger ones
        )
        self._limiter = limiter
        self._busy = False
        self._head_due = False
        self._timer: asyncio.TimerHandle | None = None
        self._socket: socket.socket | None = None
        self.entering: asyncio.Task[None] | None = None
        """Ends when the connection can be used, after the TLS handshake."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._socket = transport.get_extra_info("socket")
        self._expect_head()

    def data_received(self, data: bytes) -> None:
        if not self._busy and not self._head_due:
            self._expect_head()
        super().data_received(data)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._stop_timer()
        self._limiter.closed(self)
        super().connection_lost(exc)

    @contextmanager
    def answering(self) -> Iterator[None]:
        """Keeps the connection busy while a request is answered, and a file is sent."""
        self._stop_timer()
        self._busy = True
        self._limiter.busy(self)
        try:
            yield
        finally:
            self._busy = self._head_due = False
            if self.transport is not None:
                self._limiter.idle(self)
                self._close_after(self._limiter.limits.idle_s, "idle")

    @contextmanager
    def receiving(self) -> Iterator[None]:
        """Counts the connection as idle, within `answering`, while a small body arrives.

        It may be closed in favour of a new connection; the caller sets the body's deadline.
        """
        self._limiter.idle(self)
        try:
            yield
        finally:
            self._limiter.busy(self)

    def close_now(self, why: str) -> None:
        """Closes the connection at once, even if bytes are unsent, and reports it."""
        self._limiter.closed(self)
        self._limiter.observer.dropped(why)
        if self.transport is not None:
            self.transport.abort()
        elif self.entering is not None:
            self.entering.cancel()

    def shut_down(self) -> None:
        """Closes a connection that is closing already, on which asyncio's TLS ignores `abort`."""
        if self._socket is not None:
            with suppress(OSError):  # the peer is gone
                self._socket.shutdown(socket.SHUT_RDWR)

    def handle_error(
        self,
        request: BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """As aiohttp's, but a malformed request, body included, is not logged."""
        if isinstance(exc, web.RequestPayloadError):
            status = 400
        if status >= 500:
            return super().handle_error(request, status, exc, message)
        self._limiter.observer.malformed(status)
        response = web.Response(status=status, text="malformed request\n")
        response.force_close()
        return response

    def _expect_head(self) -> None:
        self._head_due = True
        self._close_after(self._limiter.limits.head_s, "late head")

    def _close_after(self, seconds: float, why: str) -> None:
        self._stop_timer()
        self._timer = asyncio.get_running_loop().call_later(seconds, self.close_now, why)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class ConnectionLimiter:
    """Accepts connections within limits.

    Args:
        server: aiohttp's, whose application has `answering` as its outermost middleware.
        limits: of the connections.
        observer: is called when a connection is closed or a request malformed.
        log: gets errors of `accept`.
        tls: returns the context for the next connection; None: plain HTTP.
    """

    def __init__(
        self,
        server: web.Server,
        limits: ConnectionLimits,
        observer: Observer,
        log: logging.Logger,
        *,
        tls: Callable[[], ssl.SSLContext] | None = None,
    ) -> None:
        self._server, self.limits, self.observer = server, limits, observer
        self._tls, self._log = tls, log
        self._open: set[Connection] = set()
        self._idle: dict[Connection, None] = {}
        """In the order in which they became idle."""
        self._listeners: dict[socket.socket, asyncio.TimerHandle | None] = {}
        """Listening sockets, each with the timer that ends a pause in accepting."""

    def __len__(self) -> int:
        """Connections that are open."""
        return len(self._open)

    def busy(self, connection: Connection) -> None:
        self._idle.pop(connection, None)

    def idle(self, connection: Connection) -> None:
        if connection in self._open:
            self._idle[connection] = None

    def closed(self, connection: Connection) -> None:
        self._open.discard(connection)
        self._idle.pop(connection, None)

    def open(self, listener: socket.socket) -> None:
        """Accepts connections of a listening, non-blocking socket from now on."""
        self._listeners[listener] = None
        asyncio.get_running_loop().add_reader(listener, self._accept, listener)

    async def close(self) -> None:
        """Stops accepting, and ends the TLS handshakes under way."""
        for listener, pause in self._listeners.items():
            asyncio.get_running_loop().remove_reader(listener)
            if pause is not None:
                pause.cancel()
        self._listeners.clear()
        entering = [c.entering for c in self._open if c.entering is not None]
        for task in entering:
            task.cancel()
        await asyncio.gather(*entering, return_exceptions=True)

    async def abandon(self) -> None:
        """Closes what is open after the server has ended, like TLS peers that do not answer."""
        for connection in self._open:
            connection.shut_down()
        for _ in range(_TURNS_TO_CLOSE):
            await asyncio.sleep(0)

    def _accept(self, listener: socket.socket) -> None:
        """Accepts some connections; the loop calls again for others, after other work."""
        for _ in range(_ACCEPTED_AT_ONCE):
            try:
                accepted, _ = listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as error:  # no files left, for example: try again after a pause
                self._log.error("cannot accept a connection: %s", error)
                loop = asyncio.get_running_loop()
                loop.remove_reader(listener)
                self._listeners[listener] = loop.call_later(_PAUSE_S, self.open, listener)
                return
            if len(self._open) >= self.limits.connections and self._idle:
                next(iter(self._idle)).close_now("room")  # the one that is idle for longest
            if len(self._open) >= self.limits.connections:
                self.observer.dropped("full")
                with accepted, suppress(OSError):
                    accepted.setblocking(False)
                    if self._tls is None:
                        accepted.send(_FULL)
                continue
            connection = Connection(self, self._server)
            self._open.add(connection)
            self._idle[connection] = None
            task = asyncio.create_task(self._enter(connection, accepted))
            connection.entering = task
            task.add_done_callback(functools.partial(self._entered, connection, accepted))

    async def _enter(self, connection: Connection, accepted: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        if self._tls is None:
            await loop.connect_accepted_socket(lambda: connection, accepted)
        else:
            await loop.connect_accepted_socket(
                lambda: connection,
                accepted,
                ssl=self._tls(),
                ssl_handshake_timeout=self.limits.head_s,
                ssl_shutdown_timeout=_TLS_SHUTDOWN_S,
            )

    def _entered(
        self, connection: Connection, accepted: socket.socket, task: asyncio.Task[None]
    ) -> None:
        connection.entering = None
        if task.cancelled():
            error = None
        elif (error := task.exception()) is None:
            return
        self.closed(connection)
        accepted.close()  # a task that was cancelled before its start has not
        if isinstance(error, OSError):  # ssl's errors too: no TLS, another version, gone, too slow
            self.observer.dropped("TLS")
        elif error is not None:
            self._log.error("a connection could not be accepted", exc_info=error)


@web.middleware
async def answering(request: web.Request, handler: _Handler) -> web.StreamResponse:
    """Outermost middleware of an application: marks the connection of each request as busy."""
    with connection_of(request).answering():
        return await handler(request)


def connection_of(request: web.Request) -> Connection:
    """The connection that a request came on."""
    return cast(Connection, request.protocol)


def possible_connections(
    wanted: int, log: logging.Logger, *, files_each: int, files_beside: int
) -> int:
    """Return how many connections fit the limit of open files, after raising it as far as possible.

    Args:
        wanted: connections.
        log: gets a warning if fewer are possible.
        files_each: files open at once for one connection.
        files_beside: the server's other open files.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = files_each * wanted + files_beside
    allowed = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    if soft != resource.RLIM_INFINITY and soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
        soft = allowed
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return wanted
    # At least half of the files are for connections, however few there are.
    possible = max(1, soft // 2, soft - files_beside) // files_each
    log.warning(
        "%d open files are allowed, which is enough for %d connections, not %d (`ulimit -Hn`)",
        *(soft, possible, wanted),
    )
    return max(1, possible)
