"""The HTTP face of a store, the same for origin and relay: static files and one long poll.

GET /<run>/roles.json
GET /<run>/latest.json[?after=<version>&wait=<seconds>]
GET /<run>/versions/<N>/manifest.json
GET /<run>/chunks/<blake3>
GET /metrics  /healthz
"""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import signal
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from aiohttp import web
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

from broadcast.layout import RUN
from runspec.common.canonical import MalformedJson, parse_object
from runspec.common.errors import UserError
from runspec.common.files import read_bounded, write_atomic

MAX_WAIT_S = 60.0
SERVED_NAME = "served.json"
_SHUTDOWN_S = 0.5
_COUNT_EVERY_S = 1.0


@dataclass(frozen=True)
class ServerOptions:
    """What a person may set of an origin or a relay."""

    tokens_file: Path | None = None
    """A line `NAME TOKEN` for each client that may read; None: everyone may."""
    tls_cert: Path | None = None
    """Certificate chain (PEM); with `tls_key` the server speaks TLS, without both plain HTTP."""
    tls_key: Path | None = None
    rate_limit: int | None = None
    """Bytes per second for each client (token name, else address); None: no limit."""
    max_connections: int = 4096
    """Connections open at once."""


DEFAULT_OPTIONS = ServerOptions()


class Source(Protocol):
    """Where a server's answers come from. None means: there is no such thing (404)."""

    async def roles(self, run: str) -> Path | None: ...

    async def latest(self, run: str, after: int | None, wait_s: float) -> bytes | None:
        """latest.json; where `after` is not older than it, the next one if it comes in time."""
        ...

    async def manifest(self, run: str, version: int) -> Path | None: ...

    async def chunk(self, run: str, digest: str) -> Path | None: ...

    async def work(self) -> None:
        """Runs beside the server until it is cancelled."""
        ...


class Announcement:
    """The newest latest.json of a run, and everyone who waits for a newer one."""

    def __init__(self) -> None:
        self.data: bytes | None = None
        self.version = -1
        self.waiting = 0
        self._changed = asyncio.Condition()

    async def post(self, data: bytes, version: int) -> None:
        """A newer version wakes those who wait; a fresh signature on the same one does not."""
        self.data = data
        if version > self.version:
            self.version = version
            async with self._changed:
                self._changed.notify_all()

    async def newer_than(self, after: int | None, wait_s: float) -> bytes | None:
        if after is not None and wait_s > 0 and self.version <= after:
            self.waiting += 1
            try:
                with suppress(TimeoutError):
                    async with asyncio.timeout(wait_s), self._changed:
                        await self._changed.wait_for(lambda: self.version > after)
            finally:
                self.waiting -= 1
        return self.data


class Metrics:
    """Prometheus counters, and the total of chunk bytes that survives restarts."""

    def __init__(self, store: Path) -> None:
        self._path = store / SERVED_NAME
        self.registry = CollectorRegistry()
        self._requests = Counter(
            "broadcast_requests", "Requests answered.", ["what", "status"], registry=self.registry
        )
        self._bytes = Counter(
            "broadcast_chunk_bytes", "Bytes of chunk bodies served.", registry=self.registry
        )
        self.newest = Gauge(
            "broadcast_newest_version", "Newest version known.", ["run"], registry=self.registry
        )
        self._served = self._written = _served_before(self._path)

    def count(self, what: str, status: int, chunk_bytes: int) -> None:
        self._requests.labels(what, str(status)).inc()
        self._bytes.inc(chunk_bytes)
        self._served += chunk_bytes

    def save(self) -> None:
        if self._served != self._written:
            write_atomic(self._path, json.dumps({"bytes": self._served}).encode())
            self._written = self._served

    async def keep_saving(self) -> None:
        while True:
            await asyncio.sleep(_COUNT_EVERY_S)
            await asyncio.to_thread(self.save)


def build_app(source: Source, metrics: Metrics) -> web.Application:
    """The application; only paths of exactly the forms above reach a file."""
    run = f"{{run:{RUN.pattern}}}"

    async def roles(request: web.Request) -> web.StreamResponse:
        return _file(await source.roles(request.match_info["run"]))

    async def latest(request: web.Request) -> web.StreamResponse:
        after, wait_s = _poll_parameters(request)
        data = await source.latest(request.match_info["run"], after, wait_s)
        if data is None:
            raise web.HTTPNotFound(text="nothing published yet\n")
        return web.Response(
            body=data, content_type="application/json", headers={"Cache-Control": "no-cache"}
        )

    async def manifest(request: web.Request) -> web.StreamResponse:
        version = int(request.match_info["version"])
        return _file(await source.manifest(request.match_info["run"], version))

    async def chunk(request: web.Request) -> web.StreamResponse:
        info = request.match_info
        return _file(await source.chunk(info["run"], info["digest"]), "application/octet-stream")

    async def prometheus(request: web.Request) -> web.StreamResponse:
        return web.Response(body=generate_latest(metrics.registry), content_type="text/plain")

    async def healthz(request: web.Request) -> web.StreamResponse:
        return web.Response(text="ok\n")

    async def count(request: web.Request, response: web.StreamResponse) -> None:
        what = request.match_info.route.name or "other"
        sent = what == "chunk" and response.status < 300 and request.method == "GET"
        metrics.count(what, response.status, response.content_length or 0 if sent else 0)

    app = web.Application()
    app.add_routes(
        [
            web.get(f"/{run}/roles.json", roles, name="roles"),
            web.get(f"/{run}/latest.json", latest, name="latest"),
            web.get(
                f"/{run}/versions/{{version:[0-9]{{1,10}}}}/manifest.json",
                manifest,
                name="manifest",
            ),
            web.get(f"/{run}/chunks/{{digest:[0-9a-f]{{64}}}}", chunk, name="chunk"),
            web.get("/metrics", prometheus, name="metrics"),
            web.get("/healthz", healthz, name="healthz"),
        ]
    )
    app.on_response_prepare.append(count)
    return app


async def serve(
    source: Source,
    metrics: Metrics,
    *,
    host: str,
    port: int,
    log: logging.Logger,
    started: Callable[[int], None] = lambda port: None,
    options: ServerOptions = DEFAULT_OPTIONS,
) -> None:
    """Serves until SIGTERM or SIGINT (or cancellation), then says good-bye within a second.

    Args:
        source: what to serve.
        metrics: of this server.
        host: interface to listen on.
        port: 0 picks a free one.
        log: gets the address.
        started: called with the port once connections are accepted.
        options: who may read what, how fast, and over what.

    Raises:
        UserError: the address is taken or not this machine's.
    """
    # A poll whose client has gone is kept to its end: one waiting future. (aiohttp could cancel
    # it, but would then leak the open file of a cancelled FileResponse.)
    runner = web.AppRunner(
        build_app(source, metrics), access_log=None, shutdown_timeout=_SHUTDOWN_S
    )
    listener = _listen(host, port)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    await runner.setup()
    tasks = [asyncio.create_task(c) for c in (source.work(), metrics.keep_saving(), stop.wait())]
    try:
        await web.SockSite(runner, listener, backlog=1024).start()
        for number in (signal.SIGTERM, signal.SIGINT):
            with suppress(RuntimeError, ValueError):  # not in the main thread: the caller cancels
                loop.add_signal_handler(number, stop.set)
        bound = listener.getsockname()[1]
        log.info("listening on http://%s:%d", host, bound)
        started(bound)
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await runner.cleanup()
        metrics.save()


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.create_server(address[:2], family=family, backlog=1024)
    except OSError as error:
        taken = error.errno == errno.EADDRINUSE
        raise UserError(
            "the port is taken" if taken else f"cannot listen: {error.strerror or error}",
            place=f"{host}:{port}",
            remedy="end the process that holds it, or listen on another port",
        ) from error
    listener.setblocking(False)
    return listener


def _file(path: Path | None, content_type: str = "application/json") -> web.StreamResponse:
    if path is None:
        raise web.HTTPNotFound(text="not here\n")
    return web.FileResponse(path, headers={"Content-Type": content_type})


def _poll_parameters(request: web.Request) -> tuple[int | None, float]:
    query = request.query
    try:
        after = int(query["after"]) if "after" in query else None
        wait_s = float(query.get("wait", "0"))
    except ValueError:
        raise web.HTTPBadRequest(text="after is an integer, wait seconds\n") from None
    if not wait_s >= 0:  # NaN too
        raise web.HTTPBadRequest(text="wait must not be negative\n")
    return after, min(wait_s, MAX_WAIT_S)


def _served_before(path: Path) -> int:
    try:
        total = parse_object(read_bounded(path, 1024), max_bytes=1024).get("bytes")
    except (OSError, MalformedJson):  # the first start, or a damaged counter: count from nothing
        return 0
    return total if type(total) is int and total >= 0 else 0
