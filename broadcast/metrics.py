"""What a server counts: for Prometheus, and the total of chunk bytes that survives restarts."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator, Mapping
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
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from runspec.core.canonical import MalformedJson, parse_object
from runspec.core.errors import UserError
from runspec.core.files import read_bounded, write_atomic

SERVED_NAME = "served.json"
CONTENT_TYPE = CONTENT_TYPE_LATEST
_SAVE_EVERY_S = 1.0
_CHUNKS = {"chunk", "shard"}


class Metrics:
    """Counters and gauges of one server.

    Args:
        store: the folder that keeps `served.json`.
    """

    def __init__(self, store: Path) -> None:
        self._path = store / SERVED_NAME
        self._registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        self._requests = Counter(
            "broadcast_requests", "Requests answered.", ["what", "status"], registry=registry
        )
        self._sent = Counter(
            "broadcast_sent_bytes", "Bytes of bodies sent.", ["what"], registry=registry
        )
        self.rate_limited = Counter(
            "broadcast_rate_limited", "Requests answered 429.", registry=registry
        )
        self.auth_failures = Counter(
            "broadcast_auth_failures", "Requests answered 401.", registry=registry
        )
        self._dropped = Counter(
            "broadcast_connections_dropped",
            "Connections ended by the server: late head, idle, slow reader, room for others, "
            "refused, TLS.",
            ["why"],
            registry=registry,
        )
        self.connections = Gauge("broadcast_connections", "Connections open.", registry=registry)
        self.polls = Gauge("broadcast_polls_waiting", "Long polls held.", registry=registry)
        self.transfers = Gauge(
            "broadcast_transfers", "Bodies of files being sent.", registry=registry
        )
        self._newest = Gauge(
            "broadcast_newest_version", "Newest version announced.", ["run"], registry=registry
        )
        self._behind = Gauge(
            "broadcast_behind_seconds",
            "For how long the newest version announced has not been whole here.",
            ["run"],
            registry=registry,
        )
        self._served = self._written = _served_before(self._path)

    def answered(self, what: str, status: int) -> None:
        """Counts a request of a kind (name of its route) with the status of its answer."""
        self._requests.labels(what, str(status)).inc()

    def sent(self, what: str, size: int) -> None:
        """Counts bytes of a body that the kernel has taken."""
        self._sent.labels(what).inc(size)
        if what in _CHUNKS:
            self._served += size

    def dropped(self, why: str) -> None:
        """Counts a connection that the server closed."""
        self._dropped.labels(why).inc()

    def malformed(self, status: int) -> None:
        """Counts a malformed request with the status of its answer."""
        self.answered("malformed", status)

    def announced(self, run: str, version: int) -> None:
        """The newest version that this server has announced."""
        self._newest.labels(run).set(version)

    def report_versions(self, run: str, shares: Callable[[], Mapping[int, float]]) -> None:
        """Says from now on how much of each version a relay holds.

        Args:
            run: the run's id.
            shares: gives for each version 0.0 to 1.0 of its bytes; called for every reading.
        """
        self._registry.register(_Versions(run, shares))

    def behind_since(self, run: str, since: float | None) -> None:
        """From when on (seconds since the epoch) the newest version has not been whole here.

        None: it is whole.
        """
        self._behind.labels(run).set_function(
            lambda: 0.0 if since is None else max(0.0, time.time() - since)
        )

    def text(self) -> bytes:
        """Everything in Prometheus's text format, to be sent as `CONTENT_TYPE`."""
        return generate_latest(self._registry)

    def save(self) -> None:
        """Writes `served.json` where it has changed; on a full disk it is tried again later."""
        served = self._served
        if served != self._written:
            with suppress(UserError):  # a server serves on
                write_atomic(self._path, json.dumps({"bytes": served}).encode())
                self._written = served

    async def keep_saving(self) -> None:
        while True:
            await asyncio.sleep(_SAVE_EVERY_S)
            await asyncio.to_thread(self.save)


class _Versions(Collector):
    def __init__(self, run: str, shares: Callable[[], Mapping[int, float]]) -> None:
        self._run, self._shares = run, shares

    def collect(self) -> Iterator[Metric]:
        family = GaugeMetricFamily(
            "broadcast_version_complete_ratio",
            "Share of a version's bytes that this relay holds.",
            labels=["run", "version"],
        )
        for version, share in self._shares().items():
            family.add_metric([self._run, str(version)], share)
        yield family


def _served_before(path: Path) -> int:
    try:
        total = parse_object(read_bounded(path, 1024), max_bytes=1024).get("bytes")
    except (OSError, MalformedJson):  # the first start, or a damaged counter: count from nothing
        return 0
    return total if type(total) is int and total >= 0 else 0
