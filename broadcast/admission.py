"""Limits of one client of a server, the secrets that the server reads from files, and its metrics.

Authentication, requests at once, bytes per second; client tokens and the TLS certificate, which are
read again when their files change. Metrics for Prometheus, and a total of chunk bytes that survives
restarts.
"""

from __future__ import annotations

import asyncio
import collections
import functools
import hashlib
import json
import logging
import math
import re
import secrets
import ssl
import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, TypeVar

from aiohttp import web
from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    ProcessCollector,
    generate_latest,
)

from broadcast.disk import Identity, identity
from runspec.core.canonical import MalformedJson
from runspec.core.connection_limits import Observer
from runspec.core.errors import UserError
from runspec.core.files import read_bounded, read_object, write_atomic
from runspec.core.http_server import TokenBuckets, at_once, client_address

Value = TypeVar("Value")
MAX_TOKENS_BYTES = 1024 * 1024
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_TOKEN = re.compile(r"[A-Za-z0-9._~+/=-]{16,512}")
_SCHEME = "bearer "


class Reloaded(Generic[Value]):
    """A value read from files, and read again when one of them changes.

    If the files can no longer be read, the last value stays in use and one error is logged.

    Args:
        read: called as `read(*paths, log)`, returns the value.
        paths: the files.
        log: receives the UserErrors of `read` when files have changed.

    Raises:
        UserError: the first `read` failed.
    """

    def __init__(self, read: Callable[..., Value], *paths: Path, log: logging.Logger) -> None:
        self._paths, self._log = paths, log
        self._read = functools.partial(read, *paths, log)
        self._seen = self._identities()
        self._value = self._read()

    def get(self) -> Value:
        """Return the current value; costs one stat of each file if none has changed."""
        seen = self._identities()
        if seen != self._seen:
            self._seen = seen
            try:
                self._value = self._read()
                self._log.info("read again: %s", ", ".join(map(str, self._paths)))
            except UserError as error:
                self._log.error("what was read before stays in use: %s", error)
        return self._value

    def _identities(self) -> list[Identity | None]:
        return [identity(path) for path in self._paths]


def warn_if_open(path: Path, log: logging.Logger) -> None:
    """Warn if every user of the machine may read a secret."""
    if path.stat().st_mode & 0o004:
        log.warning("%s: every user of this machine may read it; `chmod 600` it", path)


def server_context(cert: Path, key: Path, log: logging.Logger) -> ssl.SSLContext:
    """Return a server context for TLS 1.2 or newer from a certificate chain and its key (PEM).

    Raises:
        UserError: a file cannot be read, holds no certificate or key, or the two do not match.
    """
    for path in (cert, key):
        try:
            path.open("rb").close()
        except OSError as error:
            raise UserError(f"cannot read: {error.strerror}", place=str(path)) from error
    warn_if_open(key, log)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    try:
        # With no passphrase OpenSSL would ask for one at the terminal and wait.
        context.load_cert_chain(cert, key, password="")
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise UserError(
                f"is not the key of {cert}", place=str(key), remedy="give the pair that belongs"
            ) from error
        raise UserError(
            f"no certificate chain and key without a passphrase, as PEM: {error}",
            place=f"{cert}, {key}",
        ) from error
    return context


class Tokens:
    """Client names by token.

    A token is looked up by a hash with a key of this process alone, so that the time of a look-up
    reveals nothing about the tokens.

    Args:
        names: the client name of each token; a client may have several tokens.
    """

    def __init__(self, names: Mapping[str, str]) -> None:
        self._key = secrets.token_bytes(32)
        self._names = {self._hash(token): name for token, name in names.items()}

    def name_of(self, authorization: str | None) -> str | None:
        """Return the client that an `Authorization` header authenticates; None if it does not."""
        if authorization is None or not authorization.lower().startswith(_SCHEME):
            return None
        return self._names.get(self._hash(authorization[len(_SCHEME) :].strip()))

    def _hash(self, token: str) -> bytes:
        return hashlib.blake2b(token.encode(errors="replace"), key=self._key).digest()


def read_tokens(path: Path, log: logging.Logger) -> Tokens:
    """Read a tokens file: one `NAME TOKEN` a line. Empty lines and lines with # are ignored.

    Raises:
        UserError: unreadable, too large, or a malformed line (whose token is not shown).
    """
    try:
        text = read_bounded(path, MAX_TOKENS_BYTES).decode()
        warn_if_open(path, log)
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read the tokens: {error}", place=str(path)) from error
    names: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        place = f"{path}:{number}"
        if len(words) != 2 or not _NAME.fullmatch(words[0]) or not _TOKEN.fullmatch(words[1]):
            raise UserError(
                "not `NAME TOKEN` with a token of 16 to 512 letters, digits and ._~+/=-",
                place=place,
                remedy="make tokens with `openssl rand -hex 32`",
            )
        if names.setdefault(words[1], words[0]) != words[0]:
            raise UserError("this token has another name already", place=place)
    return Tokens(names)


@dataclass(eq=False)
class Admission:
    """Decides for each request which client sends it, and whether it is served now."""

    tokens: Reloaded[Tokens] | None
    """Clients that may read; None: everyone, identified by address."""
    bytes_per_s: int | None
    """Rate of each client; None: no limit. A client that is more than a second of its rate in debt
    must wait, so one answer may be larger than that, and the average still holds."""
    requests_per_client: int
    """Requests of one client at once: waiting polls and files being sent."""
    metrics: Metrics
    """Counts refused requests."""
    _under_way: collections.Counter[Hashable] = field(
        default_factory=collections.Counter, init=False
    )
    _taken: TokenBuckets = field(default_factory=TokenBuckets, init=False)

    def client(self, request: web.Request) -> str:
        """Return the client that limits count: the name of its token, else its address.

        Raises:
            HTTPUnauthorized: a token is needed, and the request has no valid one.
        """
        if self.tokens is None:
            return client_address(request.remote)
        name = self.tokens.get().name_of(request.headers.get("Authorization"))
        if name is None:
            self.metrics.auth_failures.inc()
            raise web.HTTPUnauthorized(
                headers={"WWW-Authenticate": "Bearer"}, text="a bearer token is needed\n"
            )
        return name

    @contextmanager
    def slot(self, client: str) -> Iterator[None]:
        """Hold one of the client's request slots.

        Raises:
            HTTPTooManyRequests: all slots of the client are taken.
        """
        most = self.requests_per_client
        with at_once(self._under_way, {client: most}) as allowed:
            if not allowed:
                raise self._later(1.0, f"{most} requests at once are answered\n")
            yield

    def pay(self, client: str, size: int) -> None:
        """Charge the bytes of an answer to the client.

        Raises:
            HTTPTooManyRequests: the client must wait; `Retry-After` says how long.
        """
        if self.bytes_per_s is None:
            return
        now = time.monotonic()
        wait_s = self._taken.wait_s(client, 1.0, now)
        if wait_s > 0:
            raise self._later(wait_s, "more than your bytes per second\n")
        self._taken.take(client, size / self.bytes_per_s, now)

    def _later(self, wait_s: float, text: str) -> web.HTTPTooManyRequests:
        self.metrics.rate_limited.inc()
        return web.HTTPTooManyRequests(headers={"Retry-After": f"{math.ceil(wait_s)}"}, text=text)


SERVED_NAME = "served.json"
CONTENT_TYPE = CONTENT_TYPE_LATEST
_SAVE_EVERY_S = 1.0
_CHUNKS = {"chunk", "shard"}


class Metrics(Observer):
    """Counters and gauges of one server.

    Args:
        store: the folder that keeps `served.json`.
    """

    def __init__(self, store: Path) -> None:
        self._path = store / SERVED_NAME
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        self._requests = self._counter("requests", "Requests answered.", "what", "status")
        self._sent = self._counter("sent_bytes", "Bytes of bodies sent.", "what")
        for what in _CHUNKS:
            self._sent.labels(what)  # shown as 0 until something is sent
        self.rate_limited = self._counter("rate_limited", "Requests answered 429.")
        self.auth_failures = self._counter("auth_failures", "Requests answered 401.")
        self._dropped = self._counter(
            "connections_dropped",
            "Connections ended by the server: late head, idle, slow reader, room for others, "
            "refused, TLS.",
            "why",
        )
        self.connections = self._gauge("connections", "Connections open.")
        self.polls = self._gauge("polls_waiting", "Long polls held.")
        self.transfers = self._gauge("transfers", "Bodies of files being sent.")
        self._newest = self._gauge("newest_version", "Newest version announced.", "run")
        self._behind = self._gauge(
            "behind_seconds",
            "For how long the newest version announced has not been whole here.",
            "run",
        )
        self._update_shares: Callable[[], None] = lambda: None
        self._served = 0
        with suppress(OSError, MalformedJson):  # the first start, or a damaged counter
            total = read_object(self._path, 1024).get("bytes")
            self._served = total if type(total) is int and total >= 0 else 0
        self._written = self._served

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"runspec_broadcast_{name}", text, labels, registry=self._registry)

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(f"runspec_broadcast_{name}", text, labels, registry=self._registry)

    def answered(self, what: str, status: int) -> None:
        """Count a request by the name of its route and the status of its answer."""
        self._requests.labels(what, str(status)).inc()

    def sent(self, what: str, size: int) -> None:
        """Count bytes of a body that the kernel has taken."""
        self._sent.labels(what).inc(size)
        if what in _CHUNKS:
            self._served += size

    def dropped(self, why: str) -> None:
        """Count a connection that the server closed."""
        self._dropped.labels(why).inc()

    def malformed(self, status: int) -> None:
        """Count a malformed request with the status of its answer."""
        self.answered("malformed", status)

    def announced(self, run: str, version: int) -> None:
        """Report the newest version that this server has announced."""
        self._newest.labels(run).set(version)

    def report_versions(self, run: str, shares: Callable[[], Mapping[int, float]]) -> None:
        """Add a gauge of how much of each version a relay holds.

        Args:
            run: the run's id.
            shares: returns the held share (0.0 to 1.0) of each version's bytes; called by `text`.
        """
        text = "Share of a version's bytes that this relay holds."
        gauge = self._gauge("version_complete_ratio", text, "run", "version")

        def update() -> None:
            gauge.clear()  # some versions may be gone
            for version, share in shares().items():
                gauge.labels(run, str(version)).set(share)

        self._update_shares = update

    def behind_since(self, run: str, since: float | None) -> None:
        """Report since when the newest version has been incomplete here.

        Args:
            run: the run's id.
            since: seconds since the epoch; None: the version is complete.
        """
        self._behind.labels(run).set_function(
            lambda: 0.0 if since is None else max(0.0, time.time() - since)
        )

    def text(self) -> bytes:
        """Return all metrics in Prometheus's text format, to be sent as `CONTENT_TYPE`."""
        self._update_shares()
        return generate_latest(self._registry)

    def save(self) -> None:
        """Write `served.json` if the total has changed; after a failure the next call retries."""
        served = self._served
        if served != self._written:
            with suppress(UserError):  # a full disk must not stop the server
                write_atomic(self._path, json.dumps({"bytes": served}).encode())
                self._written = served

    async def keep_saving(self) -> None:
        while True:
            await asyncio.sleep(_SAVE_EVERY_S)
            await asyncio.to_thread(self.save)
