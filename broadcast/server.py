"""HTTP server of an origin or a relay: options, TLS, start and shutdown."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aiohttp import web

from broadcast.admission import Admission, RateLimit
from broadcast.answers import FileAnswers
from broadcast.app import Find, build_app
from broadcast.credentials import Reloaded, read_tokens, server_context
from broadcast.disk import cancel_all
from broadcast.metrics import Metrics
from runspec.core.connection_limits import (
    ConnectionLimiter,
    ConnectionLimits,
    possible_connections,
)
from runspec.core.errors import UserError
from runspec.core.process import stop_event_of_loop

_MAX_LINE_BYTES = 2048
_MAX_HEADER_BYTES = 4096
_FILES_EACH = 2
"""Open files of a connection: its socket, and the file that it sends."""
_FILES_BESIDE = 256
"""Open files of a server besides those of its connections."""
_SHUTDOWN_S = 0.5


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
    host, port = options.listen
    stop = stop_event_of_loop()
    try:
        async with _limited(find, metrics, options, log) as limiter:
            with _listen(host, port) as listener:
                bound = listener.getsockname()[1]
                scheme = "http" if options.tls_cert is None else "https"
                shown = f"[{host}]" if ":" in host else host
                log.info("listening on %s://%s:%d", scheme, shown, bound)
                limiter.open(listener)
                started(bound)
                try:
                    await _until(stop, work(), metrics.keep_saving())
                finally:
                    await limiter.close()
    finally:
        metrics.save()


async def _until(stop: asyncio.Event, *work: Coroutine[Any, Any, None]) -> None:
    """Run coroutines until `stop` is set, one of them ends or fails, or cancellation."""
    tasks = [asyncio.create_task(one) for one in (*work, stop.wait())]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        await cancel_all(tasks)


@asynccontextmanager
async def _limited(
    find: Find, metrics: Metrics, options: ServerOptions, log: logging.Logger
) -> AsyncIterator[ConnectionLimiter]:
    """Yield a limiter that accepts connections and serves the runs on them."""
    limits = options.limits
    connections = possible_connections(
        options.max_connections, log, files_each=_FILES_EACH, files_beside=_FILES_BESIDE
    )
    admission = Admission(
        Reloaded(read_tokens, options.tokens_file, log=log) if options.tokens_file else None,
        None if options.rate_limit is None else RateLimit(options.rate_limit),
        requests_per_client=min(limits.requests_per_client, max(1, connections // 2)),
        metrics=metrics,
    )
    tls = _certificate(options, log)
    files = FileAnswers(metrics, floor_bytes_per_s=limits.floor_bytes_per_s)
    # A handler is cancelled when its client disconnects, so that it frees its slot at once.
    runner = web.AppRunner(
        build_app(find, metrics, admission, files),
        handler_cancellation=True,
        shutdown_timeout=_SHUTDOWN_S,
    )
    await runner.setup()
    assert runner.server is not None
    limiter = ConnectionLimiter(
        runner.server,
        ConnectionLimits(
            connections, limits.idle_s, limits.head_s, _MAX_HEADER_BYTES, _MAX_LINE_BYTES
        ),
        metrics,
        log,
        tls=tls.get if tls is not None else None,
    )
    metrics.connections.set_function(lambda: len(limiter))
    try:
        yield limiter
    finally:
        await runner.cleanup()
        await limiter.abandon()


def _certificate(options: ServerOptions, log: logging.Logger) -> Reloaded[ssl.SSLContext] | None:
    cert, key = options.tls_cert, options.tls_key
    if cert is None and key is None:
        return None
    if cert is None or key is None:
        raise UserError("--tls-cert and --tls-key belong together", remedy="give both or none")
    return Reloaded(server_context, cert, key, log=log)


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.create_server(address[:2], family=family, backlog=1024)
    except OSError as error:
        taken = error.errno == errno.EADDRINUSE
        raise UserError(
            "the port is taken" if taken else f"cannot listen: {error.strerror or error}",
            place=f"{host}:{port}",
            remedy="end the process that holds it, or listen on another port"
            if taken
            else "give an address of this machine with --listen",
        ) from error
    listener.setblocking(False)
    return listener
