"""The door of origins and relays: what its bounds are, and how its work is counted."""

from __future__ import annotations

import logging
import ssl
from collections.abc import Callable

from aiohttp import web

from broadcast.metrics import Metrics
from runspec.core import door
from runspec.core.door import Bounds, Door

MAX_LINE_BYTES = 2048
MAX_HEADER_BYTES = 4096
_FILES_EACH = 2
"""A connection's socket, and perhaps a file that is sent on it."""
_FILES_BESIDE = 256
"""Open files of a server beside those."""


def make_door(
    server: web.Server,
    *,
    max_connections: int,
    head_s: float,
    idle_s: float,
    tls: Callable[[], ssl.SSLContext] | None,
    metrics: Metrics,
    log: logging.Logger,
) -> Door:
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
    # Nothing here reads the body of a request, so nobody lingers for the rest of one.
    bounds = Bounds(max_connections, idle_s, MAX_HEADER_BYTES, MAX_LINE_BYTES, head_s)
    made = Door(server, bounds, _Counted(metrics), log, tls=tls)
    metrics.connections.set_function(lambda: len(made))
    return made


def possible_connections(wanted: int, log: logging.Logger) -> int:
    """How many connections this process may have, after asking for as many files as it may open."""
    return door.possible_connections(
        wanted, log, files_each=_FILES_EACH, files_beside=_FILES_BESIDE
    )


class _Counted:
    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def dropped(self, why: str) -> None:
        self._metrics.dropped(why)

    def malformed(self, status: int) -> None:
        self._metrics.answered("malformed", status)
