"""Who is connected: a bounded number of connections, none of which waits for nothing.

aiohttp speaks HTTP on each; here they are accepted, counted and ended. A connection is idle while
no request on it is being answered; a TLS handshake and half a request head are idle too. Where
there are too many, the one that has been idle longest makes room, so that nobody locks others out
by being connected. Who is being answered is not cut off for a newcomer.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import resource
import socket
import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from aiohttp import web
from aiohttp.web_request import BaseRequest

from broadcast.metrics import Metrics

MAX_LINE_BYTES = 2048
MAX_HEADERS = 64
MAX_HEADER_BYTES = 4096
_FILES_BESIDE = 256
"""Open files of a server beside its connections and the files that it sends on them."""
_TLS_GOODBYE_S = 2.0
_AT_ONCE = 16
_PAUSE_S = 0.1
_TURNS_TO_CLOSE = 5
"""Of the event loop, from the end of a TLS connection's bytes to that of its socket."""
_FULL = b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nContent-Length: 0\r\n\r\n"


class Connection(web.RequestHandler):
    """One connection: of its three states (a head is due, idle, answering) each ends in time."""

    def __init__(self, door: Door, server: web.Server) -> None:
        super().__init__(
            server,
            loop=asyncio.get_running_loop(),
            keepalive_timeout=2 * door.idle_s,  # never waited for: the door is quicker
            access_log=None,  # type: ignore[arg-type]  # its own default, and what turns it off
            max_line_size=MAX_LINE_BYTES,
            max_headers=MAX_HEADERS,
            max_field_size=MAX_HEADER_BYTES,
            lingering_time=0.0,  # nothing here reads the body of a request
            auto_decompress=False,
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
        self._expect_head()

    def data_received(self, data: bytes) -> None:
        if not self._busy and not self._head_due:
            self._expect_head()
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
                self._end_after(self._door.idle_s, "idle")

    def end(self, why: str) -> None:
        """Disconnects at once, unsent bytes or not, and counts it."""
        self._door.left(self)
        self._door.metrics.dropped(why)
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
        """As aiohttp's, but a malformed request is counted and no event for the log."""
        if status >= 500:
            return super().handle_error(request, status, exc, message)
        self._door.metrics.answered("malformed", status)
        response = web.Response(status=status, text="malformed request\n")
        response.force_close()
        return response

    def _expect_head(self) -> None:
        self._head_due = True
        self._end_after(self._door.head_s, "late head")

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
        server: aiohttp's, whose application answers.
        max_connections: open at once.
        head_s: within this a request's head is whole, counted from its first byte or from the
            connection's start, and a TLS handshake done.
        idle_s: between two requests.
        tls: gives the context for the next connection; None: plain HTTP.
        metrics: counts connections and why they were ended.
        log: gets what keeps new ones out.
    """

    def __init__(
        self,
        server: web.Server,
        *,
        max_connections: int,
        head_s: float,
        idle_s: float,
        tls: Callable[[], ssl.SSLContext] | None,
        metrics: Metrics,
        log: logging.Logger,
    ) -> None:
        self._server = server
        self._max_connections = max_connections
        self.head_s = head_s
        self.idle_s = idle_s
        self._tls = tls
        self.metrics = metrics
        self._log = log
        self._open: set[Connection] = set()
        self._idle: dict[Connection, None] = {}
        """In the order in which they became idle."""
        self._listener: socket.socket | None = None
        self._pause: asyncio.TimerHandle | None = None
        metrics.connections.set_function(lambda: len(self._open))

    def busy(self, connection: Connection) -> None:
        self._idle.pop(connection, None)

    def idle(self, connection: Connection) -> None:
        self._idle[connection] = None

    def left(self, connection: Connection) -> None:
        self._open.discard(connection)
        self._idle.pop(connection, None)

    def open(self, listener: socket.socket) -> None:
        """Accepts from now on."""
        self._listener = listener
        asyncio.get_running_loop().add_reader(listener, self._accept)

    async def close(self) -> None:
        """Accepts no more, and ends the handshakes that are under way."""
        if self._listener is not None:
            asyncio.get_running_loop().remove_reader(self._listener)
        if self._pause is not None:
            self._pause.cancel()
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

    def _accept(self) -> None:
        """Some of the newcomers; the loop calls again for the others, after other work."""
        assert self._listener is not None
        for _ in range(_AT_ONCE):
            try:
                accepted, _ = self._listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as error:  # no files left, say; connections end, and it goes on
                self._log.error("cannot accept a connection: %s", error)
                loop = asyncio.get_running_loop()
                loop.remove_reader(self._listener)
                self._pause = loop.call_later(_PAUSE_S, self.open, self._listener)
                return
            if self._has_room():
                self._let_in(accepted)
            else:
                self._refuse(accepted)

    def _has_room(self) -> bool:
        """Whether one more may come in, where need be in the place of the longest idle."""
        if len(self._open) >= self._max_connections and self._idle:
            next(iter(self._idle)).end("room")
        return len(self._open) < self._max_connections

    def _refuse(self, accepted: socket.socket) -> None:
        self.metrics.dropped("full")
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
                ssl_handshake_timeout=self.head_s,
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
            self.metrics.dropped("TLS")
        elif error is not None:
            self._log.error("a connection could not be taken in", exc_info=error)


def possible_connections(wanted: int, log: logging.Logger) -> int:
    """How many connections this process may have, after asking for as many files as it may open.

    Each has a socket and perhaps a file that is sent on it.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = 2 * wanted + _FILES_BESIDE
    allowed = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    if soft != resource.RLIM_INFINITY and soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
        soft = allowed
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return wanted
    possible = max(1, (soft - _FILES_BESIDE) // 2)
    log.warning(
        "%d open files are allowed, which is enough for %d connections, not %d (`ulimit -Hn`)",
        soft,
        possible,
        wanted,
    )
    return possible
