"""The coordinator's listening sockets and connections: `runspec.core.connection_limits`."""

from __future__ import annotations

import asyncio
import logging
import socket
from contextlib import ExitStack

from aiohttp import web

from runspec.core.connection_limits import (
    ConnectionLimiter,
    ConnectionLimits,
    possible_connections,
)

_log = logging.getLogger(__name__)

MAX_CONNECTIONS = 8192
IDLE_S = 75.0
"""Longer than a reverse proxy (60 s) keeps a connection for its next request."""
HEAD_S = 30.0
LINGER_S = 10.0
MAX_HEADER_BYTES = 32 * 1024
"""The largest header is a verdict's envelope, at most 16 KiB before base64."""
_FILES_BESIDE = 1024
"""Open files beside the connections: ledger, uploads, connections about to be closed."""
_WARN_EVERY_S = 10.0


class Connections:
    """The connections of one server, whose outermost middleware is `answering`."""

    def __init__(self) -> None:
        self._limiter: ConnectionLimiter | None = None
        self._listeners: list[socket.socket] = []
        self._warned = -_WARN_EVERY_S

    def __len__(self) -> int:
        return 0 if self._limiter is None else len(self._limiter)

    def listen(self, server: web.Server, host: str, port: int) -> int:
        """Accept connections from now on; returns the port.

        Args:
            server: aiohttp's.
            host, port: where to listen, at every address of the host; port 0 picks a free one.

        Raises:
            OSError: the address cannot be used.
        """
        most = possible_connections(MAX_CONNECTIONS, _log, files_each=1, files_beside=_FILES_BESIDE)
        limits = ConnectionLimits(most, IDLE_S, HEAD_S, MAX_HEADER_BYTES, linger_s=LINGER_S)
        self._listeners = _listeners(host, port)
        self._limiter = ConnectionLimiter(server, limits, self, _log)
        for listener in self._listeners:
            self._limiter.open(listener)
        bound: int = self._listeners[0].getsockname()[1]
        return bound

    async def close(self) -> None:
        """Stop accepting."""
        if self._limiter is not None:
            await self._limiter.close()
        for listener in self._listeners:
            listener.close()

    def dropped(self, why: str) -> None:
        """Warn when the limit is reached, at most every `_WARN_EVERY_S`."""
        now = asyncio.get_running_loop().time()
        if why in ("room", "full") and now >= self._warned + _WARN_EVERY_S:
            self._warned = now
            _log.warning("%d connections are open: the longest idle are closed", len(self))

    def malformed(self, status: int) -> None:
        """Nothing: anybody can cause any number of them."""


def _listeners(host: str, port: int) -> list[socket.socket]:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    listeners: list[socket.socket] = []
    with ExitStack() as on_error:
        for family, address in dict.fromkeys((each[0], each[4][0]) for each in found):
            listener = socket.create_server((str(address), port), family=family, backlog=128)
            on_error.callback(listener.close)
            listener.setblocking(False)
            listeners.append(listener)
            port = listener.getsockname()[1]
        on_error.pop_all()
    return listeners
