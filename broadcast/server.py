"""HTTP server of an origin or a relay: static files, one long poll, metrics; options and TLS.

GET /<run>/roles.json
GET /<run>/latest.json[?after=<version>&wait=<seconds>]
GET /<run>/versions/<N>/manifest.json
GET /<run>/chunks/<blake3>
GET /<run>/shardcast/distribution.txt
GET /<run>/shardcast/v<N>/shard_<number from 00001>.bin
GET /<run>/shardcast/data1.bin
GET /metrics  /healthz

The `shardcast` paths serve clients of the published `shardcast` package from the store's own
chunks. Such a client downloads one file for each version and joins its shards, so it sees only the
anchors whose weights are the one file `model.safetensors`. It checks the BLAKE3 of the whole file,
but no signature.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aiohttp import web

from broadcast.admission import (
    CONTENT_TYPE,
    Admission,
    Metrics,
    Reloaded,
    read_tokens,
    server_context,
)
from broadcast.answers import IMMUTABLE, REVALIDATE, FileAnswers, Kind, ServedRun, not_modified
from broadcast.layout import RUN
from broadcast.manifest import ObjectInfo, WeightsManifest
from runspec.core.canonical import digest_bytes
from runspec.core.connection_limits import ConnectionLimits, connection_of, possible_connections
from runspec.core.errors import UserError
from runspec.core.http_server import serving, until
from runspec.core.process import stop_event_of_loop

MAX_WAIT_S = 60.0
"""Longest wait of a poll, in seconds."""
_GONE = 499
"""Status, in the metrics only, of an answer whose client has disconnected."""
_HEALTH = "healthz"
_METRICS = "metrics"
_CLIENT = web.RequestKey("client", str)

_ROLES = Kind("roles", REVALIDATE, "application/json")
_MANIFEST = Kind("manifest", IMMUTABLE, "application/json")
_CHUNK = Kind("chunk", IMMUTABLE)
_SHARD = Kind("shard", IMMUTABLE)
_SHARDCAST_FILE = "model.safetensors"
_SHARDCAST_PROBE = bytes(64 * 1024)
"""`data1.bin`, which a shardcast client downloads first to measure the server."""

Find = Callable[[str], ServedRun | None]
"""Returns the served run of a name."""
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_MAX_LINE_BYTES = 2048
_MAX_HEADER_BYTES = 4096
_FILES_EACH = 2
"""Open files of a connection: its socket, and the file that it sends."""
_FILES_BESIDE = 256
"""Open files of a server besides those of its connections."""


def build_app(
    find: Find, metrics: Metrics, admission: Admission, files: FileAnswers
) -> web.Application:
    """Return the application; only paths of exactly the forms above reach a file."""
    run = f"{{run:{RUN.pattern}}}"

    def run_of(request: web.Request) -> ServedRun:
        found = find(request.match_info["run"])
        if found is None:
            raise web.HTTPNotFound(text="not here\n")
        return found

    async def send(
        request: web.Request, path: Path | None, kind: Kind, etag: str | None = None
    ) -> web.StreamResponse:
        pay = functools.partial(admission.pay, request[_CLIENT])
        return await files.send(request, path, kind, pay=pay, etag=etag)

    async def roles(request: web.Request) -> web.StreamResponse:
        return await send(request, await run_of(request).roles(), _ROLES)

    async def latest(request: web.Request) -> web.StreamResponse:
        after, wait_s = _poll_parameters(request)
        with metrics.polls.track_inprogress():
            data = await run_of(request).latest(after, wait_s)
        if data is None:
            raise web.HTTPNotFound(text="nothing published yet\n")
        etag = digest_bytes(data)
        headers = {"Cache-Control": REVALIDATE, "ETag": f'"{etag}"'}
        if not_modified(request, etag):
            return web.Response(status=304, headers=headers)
        return web.Response(body=data, content_type="application/json", headers=headers)

    async def manifest(request: web.Request) -> web.StreamResponse:
        path = await run_of(request).manifest(int(request.match_info["version"]))
        return await send(request, path, _MANIFEST)

    async def chunk(request: web.Request) -> web.StreamResponse:
        digest = request.match_info["digest"]
        return await send(request, await run_of(request).chunk(digest), _CHUNK, digest)

    async def distribution(request: web.Request) -> web.StreamResponse:
        held = await run_of(request).held.current()
        headers = {"Cache-Control": REVALIDATE}
        return web.Response(text=shardcast_distribution(held), headers=headers)

    async def shard(request: web.Request) -> web.StreamResponse:
        run, version = run_of(request), int(request.match_info["version"])
        held = (await run.held.current()).get(version)
        weights, number = held and _shardcast_weights(held), int(request.match_info["number"])
        if not weights or not 1 <= number <= len(weights.chunks):
            raise web.HTTPNotFound(text="not here\n")
        digest = weights.chunks[number - 1].blake3
        return await send(request, await run.chunk(digest), _SHARD, digest)

    async def probe(request: web.Request) -> web.StreamResponse:
        return web.Response(body=_SHARDCAST_PROBE, headers={"Cache-Control": "no-store"})

    async def prometheus(request: web.Request) -> web.StreamResponse:
        return web.Response(body=metrics.text(), headers={"Content-Type": CONTENT_TYPE})

    async def healthz(request: web.Request) -> web.StreamResponse:
        return web.Response(text="ok\n")

    version = "{version:[0-9]{1,10}}"
    app = web.Application(middlewares=[_middleware(admission, metrics)])
    app.add_routes(
        [
            web.get(f"/{run}/roles.json", roles, name="roles"),
            web.get(f"/{run}/latest.json", latest, name="latest"),
            web.get(f"/{run}/versions/{version}/manifest.json", manifest, name="manifest"),
            web.get(f"/{run}/chunks/{{digest:[0-9a-f]{{64}}}}", chunk, name="chunk"),
            web.get(f"/{run}/shardcast/distribution.txt", distribution, name="distribution"),
            web.get(
                f"/{run}/shardcast/v{version}/shard_{{number:[0-9]{{5,6}}}}.bin",
                shard,
                name="shard",
            ),
            web.get(f"/{run}/shardcast/data1.bin", probe, name="probe"),
            web.get("/metrics", prometheus, name=_METRICS),
            web.get("/healthz", healthz, name=_HEALTH),
        ]
    )
    return app


def shardcast_distribution(manifests: Mapping[int, WeightsManifest]) -> str:
    """Return `distribution.txt`: lines `v<N>: <BLAKE3 of the weights>|<shards>`."""
    return "".join(
        f"v{version}: {weights.blake3}|{len(weights.chunks)}\n"
        for version, manifest in sorted(manifests.items())
        if (weights := _shardcast_weights(manifest)) is not None
    )


def _shardcast_weights(manifest: WeightsManifest) -> ObjectInfo | None:
    """Return the one file of a version's weights; None if shardcast clients cannot use it."""
    single = manifest.files in ((_SHARDCAST_FILE,), ())  # () if the publisher named no tensors
    return manifest.objects.get(_SHARDCAST_FILE) if single and manifest.is_anchor else None


def _middleware(
    admission: Admission, metrics: Metrics
) -> Callable[..., Awaitable[web.StreamResponse]]:
    """Return the middleware that authenticates, limits and counts every request."""

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        what = request.match_info.route.name or "other"
        status = 500
        try:
            with connection_of(request).answering():
                response = await admitted(request, what, handler)
            status = response.status
            return response
        except web.HTTPException as error:
            error.headers["Cache-Control"] = "no-store"  # the next request may succeed
            status = error.status
            raise
        except asyncio.CancelledError:
            status = _GONE
            raise
        finally:
            metrics.answered(what, status)

    async def admitted(request: web.Request, what: str, handler: Handler) -> web.StreamResponse:
        if request.method not in ("GET", "HEAD"):
            raise web.HTTPMethodNotAllowed(request.method, ("GET", "HEAD"))
        if what == _HEALTH:
            return await handler(request)
        request[_CLIENT] = client = admission.client(request)
        if what == _METRICS:  # readable even while the client has all its slots taken
            return await handler(request)
        with admission.slot(client):
            return await handler(request)

    return middleware


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
    cert, key = options.tls_cert, options.tls_key
    if (cert is None) != (key is None):
        raise UserError("--tls-cert and --tls-key belong together", remedy="give both or none")
    tls = Reloaded(server_context, cert, key, log=log) if cert and key else None
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
