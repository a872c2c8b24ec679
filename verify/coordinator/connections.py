"""Who is connected to the coordinator: `runspec.core.door` with its bounds.

A connection on which nothing is being answered ends after `IDLE_S`, half a head or an answer that
is not taken included.
"""

from __future__ import annotations

import asyncio
import logging
import socket

from aiohttp import web

from runspec.core.door import Bounds, Door, answering, possible_connections
from verify.coordinator.server import MAX_HEADER_BYTES

_log = logging.getLogger(__name__)

MAX_CONNECTIONS = 8192
IDLE_S = 75.0
"""Longer than a reverse proxy (60 s) keeps a connection for its next request."""
LINGER_S = 10.0
"""How long the rest of a body that nobody reads is taken, so that its sender reads the answer."""
_ACCEPTED_AT_ONCE = 128
_FILES_BESIDE = 1024
"""Open files beside the connections: the ledger, uploads, what is accepted before another ends."""
_FULL_EVERY_S = 10.0


class Connections:
    """The connections of one server, in whose application `answering` is the outermost
    middleware."""

    answering = staticmethod(answering)

    def __init__(self) -> None:
        self._bounds = Bounds(
            connections=possible_connections(
                MAX_CONNECTIONS, _log, files_each=1, files_beside=_FILES_BESIDE
            ),
            idle_s=IDLE_S,
            header_bytes=MAX_HEADER_BYTES,
            linger_s=LINGER_S,
        )
        self._door: Door | None = None
        self._listeners: list[socket.socket] = []
        self._told = -_FULL_EVERY_S

    @property
    def most(self) -> int:
        """That may be open at once."""
        return self._bounds.connections

    def __len__(self) -> int:
        return 0 if self._door is None else len(self._door)

    def listen(self, server: web.Server, host: str, port: int) -> int:
        """Lets connections in; returns the port.

        Args:
            server: aiohttp's.
            host, port: where to listen, at every address of that name; port 0 picks a free one.

        Raises:
            OSError: the address cannot be had.
        """
        self._listeners = _listeners(host, port)
        self._door = Door(server, self._bounds, self, _log)
        for listener in self._listeners:
            self._door.open(listener)
        bound: int = self._listeners[0].getsockname()[1]
        return bound

    async def close(self) -> None:
        """Lets no more in."""
        if self._door is not None:
            await self._door.close()
        for listener in self._listeners:
            listener.close()

    def dropped(self, why: str) -> None:
        now = asyncio.get_running_loop().time()
        if why in ("room", "full") and now >= self._told + _FULL_EVERY_S:
            self._told = now
            most = self._bounds.connections
            _log.warning("%d connections are open: the longest idle make room", most)

    def malformed(self, status: int) -> None:
        """It was answered; there may be any number of them."""


def _listeners(host: str, port: int) -> list[socket.socket]:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    listeners: list[socket.socket] = []
    try:
        for family, address in dict.fromkeys((each[0], each[4][0]) for each in found):
            listener = socket.create_server(
                (str(address), port), family=family, backlog=_ACCEPTED_AT_ONCE
            )
            listener.setblocking(False)
            listeners.append(listener)
            port = listener.getsockname()[1]
    except OSError:
        for listener in listeners:
            listener.close()
        raise
    return listeners
