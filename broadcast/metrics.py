"""Metrics of a server: for Prometheus, and a total of chunk bytes that survives restarts."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    ProcessCollector,
    generate_latest,
)

from runspec.core.canonical import MalformedJson
from runspec.core.connection_limits import Observer
from runspec.core.errors import UserError
from runspec.core.files import read_object, write_atomic

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
        self._served = self._written = _served_before(self._path)

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


def _served_before(path: Path) -> int:
    try:
        total = read_object(path, 1024).get("bytes")
    except (OSError, MalformedJson):  # the first start, or a damaged counter: count from 0
        return 0
    return total if type(total) is int and total >= 0 else 0
