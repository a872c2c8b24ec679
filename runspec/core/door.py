"""The door of a server: a bounded number of connections, none of which waits for nothing.

aiohttp speaks HTTP on each; here they are accepted, counted and ended. A connection is idle while
no request on it is being answered: before the first one, during a TLS handshake, while half a head
is there, while the last answer is not taken. Where there are too many, the one that has been idle
longest makes room, so that nobody locks others out by being connected, and the process never runs
out of files. Who is being answered is not cut off for a newcomer; that has bounds of its own, which
are the application's: of the body, of long polls, of what is sent.
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
from typing import Protocol, cast

from aiohttp import web
from aiohttp.web_request import BaseRequest

MAX_HEADERS = 64
_TLS_GOODBYE_S = 2.0
_AT_ONCE = 16
_PAUSE_S = 0.1
_TURNS_TO_CLOSE = 5
"""Of the event loop, from the end of a TLS connection's bytes to that of its socket."""
_FULL = b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nContent-Length: 0\r\n\r\n"

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True)
class Bounds:
    """Of a server's connections, and of the requests' heads on them."""

    connections: int
    """Open at once."""
    idle_s: float
    """Without a request that is being answered."""
    header_bytes: int
    """Of one header."""
    line_bytes: int = 8190
    """Of a request's first line."""
    head_s: float | None = None
    """Within this a head is whole, counted from its first byte or from the connection's start, and
    a TLS handshake done; None: a connection on which half of one is there is idle as others are."""
    linger_s: float = 0.0
    """How long the rest of a body that nobody reads is taken, so that its sender reads the
    answer."""


class Witness(Protocol):
    """Is told of what the door does."""

    def dropped(self, why: str) -> None:
        """A connection was ended: late head, idle, room, full, TLS."""
        ...

    def malformed(self, status: int) -> None:
        """A request was none, and this was answered."""
        ...


class Connection(web.RequestHandler):
    """One connection. It is answering, idle, or a head is due; the last two end in time."""

    def __init__(self, door: Door, server: web.Server) -> None:
        super().__init__(
            server,
            loop=asyncio.get_running_loop(),
            keepalive_timeout=2 * door.bounds.idle_s,  # never waited for: the door is quicker
            access_log=None,  # type: ignore[arg-type]  # its own default, and what turns it off
            max_line_size=door.bounds.line_bytes,
            max_headers=MAX_HEADERS,
            max_field_size=door.bounds.header_bytes,
            lingering_time=door.bounds.linger_s,
            auto_decompress=False,  # a body is the bytes that were sent, never larger ones
        )
        self._door = door
        self._busy = False
        self._head_due = False
        self._timer: asyncio.TimerHandle | None = None
        self._socket: socket.socket | None = None
        self.entering: asyncio.Task[None] | None = None
        """Ends once the connection can be used, after the TLS handshake."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._socket = transport.get_extra_info("socket")
        if self._door.bounds.head_s is None:
            self._end_after(self._door.bounds.idle_s, "idle")
        else:
            self._expect_head(self._door.bounds.head_s)

    def data_received(self, data: bytes) -> None:
        head_s = self._door.bounds.head_s
        if head_s is not None and not self._busy and not self._head_due:
            self._expect_head(head_s)
        super().data_received(data)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._stop_timer()
        self._door.left(self)
        super().connection_lost(exc)

    @contextmanager
    def answering(self) -> Iterator[None]:
        """Around the answer to a request, the sending of a file included."""
        self._stop_timer()
        self._busy = True
        self._door.busy(self)
        try:
            yield
        finally:
            self._busy = self._head_due = False
            if self.transport is not None:
                self._door.idle(self)
                self._end_after(self._door.bounds.idle_s, "idle")

    def end(self, why: str) -> None:
        """Disconnects at once, unsent bytes or not, and counts it."""
        self._door.left(self)
        self._door.witness.dropped(why)
        if self.transport is not None:
            self.transport.abort()
        elif self.entering is not None:
            self.entering.cancel()

    def hang_up(self) -> None:
        """Disconnects one that is closing, too: then asyncio's TLS knows of no `abort` any more."""
        if self._socket is not None:
            with suppress(OSError):  # it has gone meanwhile
                self._socket.shutdown(socket.SHUT_RDWR)

    def handle_error(
        self,
        request: BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """As aiohttp's, but a malformed request, body included, is no event for the log."""
        if isinstance(exc, web.RequestPayloadError):
            status = 400
        if status >= 500:
            return super().handle_error(request, status, exc, message)
        self._door.witness.malformed(status)
        response = web.Response(status=status, text="malformed request\n")
        response.force_close()
        return response

    def _expect_head(self, head_s: float) -> None:
        self._head_due = True
        self._end_after(head_s, "late head")

    def _end_after(self, seconds: float, why: str) -> None:
        self._stop_timer()
        self._timer = asyncio.get_running_loop().call_later(seconds, self.end, why)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class Door:
    """Lets connections in.

    Args:
        server: aiohttp's, whose application answers, within `Connection.answering`.
        bounds: of the connections.
        witness: told of those that were ended.
        log: gets what keeps new ones out.
        tls: gives the context for the next connection; None: plain HTTP.
    """

    def __init__(
        self,
        server: web.Server,
        bounds: Bounds,
        witness: Witness,
        log: logging.Logger,
        *,
        tls: Callable[[], ssl.SSLContext] | None = None,
    ) -> None:
        self._server, self.bounds, self.witness = server, bounds, witness
        self._tls, self._log = tls, log
        self._open: set[Connection] = set()
        self._idle: dict[Connection, None] = {}
        """In the order in which they became idle."""
        self._listeners: dict[socket.socket, asyncio.TimerHandle | None] = {}
        """With what ends a pause in accepting."""

    def __len__(self) -> int:
        """Connections that are open."""
        return len(self._open)

    def busy(self, connection: Connection) -> None:
        self._idle.pop(connection, None)

    def idle(self, connection: Connection) -> None:
        if connection in self._open:
            self._idle[connection] = None

    def left(self, connection: Connection) -> None:
        self._open.discard(connection)
        self._idle.pop(connection, None)

    def open(self, listener: socket.socket) -> None:
        """Accepts from now on what comes to a socket that listens, and does not block."""
        self._listeners[listener] = None
        asyncio.get_running_loop().add_reader(listener, self._accept, listener)

    async def close(self) -> None:
        """Accepts no more, and ends the handshakes that are under way."""
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
        """Disconnects who is still connected, after the server has ended: TLS peers, say, that do
        not say good-bye."""
        for connection in self._open:
            connection.hang_up()
        for _ in range(_TURNS_TO_CLOSE):
            await asyncio.sleep(0)

    def _accept(self, listener: socket.socket) -> None:
        """Some of the newcomers; the loop calls again for the others, after other work."""
        for _ in range(_AT_ONCE):
            try:
                accepted, _ = listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as error:  # no files left, say; connections end, and it goes on
                self._log.error("cannot accept a connection: %s", error)
                loop = asyncio.get_running_loop()
                loop.remove_reader(listener)
                self._listeners[listener] = loop.call_later(_PAUSE_S, self.open, listener)
                return
            if self._has_room():
                self._let_in(accepted)
            else:
                self._refuse(accepted)

    def _has_room(self) -> bool:
        """Whether one more may come in, where need be in the place of the longest idle."""
        if len(self._open) >= self.bounds.connections and self._idle:
            next(iter(self._idle)).end("room")
        return len(self._open) < self.bounds.connections

    def _refuse(self, accepted: socket.socket) -> None:
        self.witness.dropped("full")
        with accepted, suppress(OSError):
            accepted.setblocking(False)
            if self._tls is None:
                accepted.send(_FULL)

    def _let_in(self, accepted: socket.socket) -> None:
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
                ssl_handshake_timeout=self.bounds.head_s or self.bounds.idle_s,
                ssl_shutdown_timeout=_TLS_GOODBYE_S,
            )

    def _entered(
        self, connection: Connection, accepted: socket.socket, task: asyncio.Task[None]
    ) -> None:
        connection.entering = None
        if task.cancelled():
            error = None
        elif (error := task.exception()) is None:
            return
        self.left(connection)
        accepted.close()  # a task that was cancelled before it began has not
        if isinstance(error, OSError):  # ssl's errors too: no TLS, another version, gone, too slow
            self.witness.dropped("TLS")
        elif error is not None:
            self._log.error("a connection could not be taken in", exc_info=error)


@web.middleware
async def answering(request: web.Request, handler: _Handler) -> web.StreamResponse:
    """The outermost of an application's: around the answer to each request."""
    with cast(Connection, request.protocol).answering():
        return await handler(request)


def possible_connections(
    wanted: int, log: logging.Logger, *, files_each: int, files_beside: int
) -> int:
    """How many connections this process may have, after asking for as many files as it may open.

    Args:
        wanted: how many it should have.
        log: told where it is fewer.
        files_each: open at once for one connection.
        files_beside: of the server's beside those.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = files_each * wanted + files_beside
    allowed = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    if soft != resource.RLIM_INFINITY and soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
        soft = allowed
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return wanted
    # However few there are, half of them are for connections.
    possible = max(1, soft // 2, soft - files_beside) // files_each
    log.warning(
        "%d open files are allowed, which is enough for %d connections, not %d (`ulimit -Hn`)",
        *(soft, possible, wanted),
    )
    return max(1, possible)
