"""HTTP server of an origin or a relay: options, TLS, start and shutdown."""

from __future__ import annotations

import logging
import ssl
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from broadcast.admission import Admission
from broadcast.answers import FileAnswers
from broadcast.app import Find, build_app
from broadcast.credentials import Reloaded, read_tokens, server_context
from broadcast.metrics import Metrics
from runspec.core.connection_limits import ConnectionLimits, possible_connections
from runspec.core.errors import UserError
from runspec.core.http_server import serving, until
from runspec.core.process import stop_event_of_loop

_MAX_LINE_BYTES = 2048
_MAX_HEADER_BYTES = 4096
_FILES_EACH = 2
"""Open files of a connection: its socket, and the file that it sends."""
_FILES_BESIDE = 256
"""Open files of a server besides those of its connections."""


@dataclass(frozen=True)
class Limits:
    """Limits of one client or connection, so that a client cannot use up what all share."""

    head_s: float = 10.0
    """Seconds that a request's head, or a TLS handshake, may take."""
    idle_s: float = 75.0
    """Seconds that a connection may be idle between two requests."""
    floor_bytes_per_s: float = 64 * 1024
    """Lowest rate of a reader, measured over 4 MiB; a slower reader is disconnected."""
    requests_per_client: int = 256
    """Requests of one client at once (waiting polls, bodies being sent); at most half of
    `max_connections`."""


@dataclass(frozen=True)
class ServerOptions:
    """Options of an origin or a relay."""

    listen: tuple[str, int] = ("127.0.0.1", 0)
    """Interface and port; port 0 selects a free one."""
    tokens_file: Path | None = None
    """File with a line `NAME TOKEN` for each client that may read; None: everyone may."""
    tls_cert: Path | None = None
    """Certificate chain (PEM). With `tls_key` the server speaks TLS, without both plain HTTP."""
    tls_key: Path | None = None
    rate_limit: int | None = None
    """Bytes per second for each client (token name, else address); None: no limit."""
    max_connections: int = 4096
    """Connections open at once."""
    limits: Limits = Limits()


DEFAULT_OPTIONS = ServerOptions()


async def serve(
    find: Find,
    work: Callable[[], Coroutine[Any, Any, None]],
    metrics: Metrics,
    log: logging.Logger,
    options: ServerOptions,
    started: Callable[[int], None],
) -> None:
    """Serve until SIGTERM, SIGINT or cancellation, then shut down within a second.

    Args:
        find: returns the served run of a name.
        work: runs beside the server.
        metrics: of this server.
        log: receives the address.
        options: address, tokens, TLS and limits.
        started: called with the port once connections are accepted.

    Raises:
        UserError: the address is taken or not of this machine, or an option is invalid.
    """
    limits = options.limits
    stop = stop_event_of_loop()
    connections = possible_connections(
        options.max_connections, log, files_each=_FILES_EACH, files_beside=_FILES_BESIDE
    )
    admission = Admission(
        Reloaded(read_tokens, options.tokens_file, log=log) if options.tokens_file else None,
        options.rate_limit,
        requests_per_client=min(limits.requests_per_client, max(1, connections // 2)),
        metrics=metrics,
    )
    files = FileAnswers(metrics, floor_bytes_per_s=limits.floor_bytes_per_s)
    tls = _certificate(options, log)
    bounds = ConnectionLimits(
        connections, limits.idle_s, limits.head_s, _MAX_HEADER_BYTES, _MAX_LINE_BYTES
    )
    application = build_app(find, metrics, admission, files)
    get_tls = None if tls is None else tls.get
    try:
        async with serving(application, options.listen, bounds, metrics, log, tls=get_tls) as (
            bound,
            limiter,
        ):
            metrics.connections.set_function(lambda: len(limiter))
            host = options.listen[0]
            shown = f"[{host}]" if ":" in host else host
            log.info("listening on %s://%s:%d", "http" if tls is None else "https", shown, bound)
            started(bound)
            await until(stop, work(), metrics.keep_saving())
    finally:
        metrics.save()


def _certificate(options: ServerOptions, log: logging.Logger) -> Reloaded[ssl.SSLContext] | None:
    cert, key = options.tls_cert, options.tls_key
    if cert is None and key is None:
        return None
    if cert is None or key is None:
        raise UserError("--tls-cert and --tls-key belong together", remedy="give both or none")
    return Reloaded(server_context, cert, key, log=log)
