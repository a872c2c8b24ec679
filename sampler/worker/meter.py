"""Totals of a worker's work, for heartbeats and Prometheus.

They are cumulative, so losing one does no harm.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from runspec.core.metrics import counter, gauge


class Meter(Collector):
    """Sampling time, tokens and loads since the process began. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._started = time.monotonic()
        self._leases = 0
        self._busy_s = 0.0
        self._busy_since = 0.0
        self._tokens = 0
        self._version = -1
        self._loads = 0
        self._pause_s = 0.0
        self._answers: Counter[str] = Counter({"accepted": 0, "refused": 0})

    def lease_began(self) -> None:
        """Note that the sampling of a lease began. Time counts as busy while at least one lease is
        sampled."""
        with self._lock:
            if self._leases == 0:
                self._busy_since = time.monotonic()
            self._leases += 1

    def lease_ended(self, tokens: int = 0) -> None:
        """Note that a lease was sampled or given up.

        Args:
            tokens: its output tokens.
        """
        with self._lock:
            self._leases -= 1
            self._tokens += tokens
            if self._leases == 0:
                self._busy_s += time.monotonic() - self._busy_since

    def loaded(self, version: int, pause_s: float) -> None:
        """Note that a version was loaded.

        Args:
            version: its number.
            pause_s: seconds in which nothing could be sampled for it.
        """
        with self._lock:
            self._version = version
            self._loads += 1
            self._pause_s += pause_s

    def submitted(self, *, accepted: bool) -> None:
        """Count a submission that the coordinator took or refused."""
        with self._lock:
            self._answers["accepted" if accepted else "refused"] += 1

    def collect(self) -> Iterator[Metric]:
        """Yield the figures for Prometheus."""
        state = self.state()
        with self._lock:
            leases, answers = self._leases, dict(self._answers)
        version = None if state["version"] < 0 else state["version"]
        yield gauge("worker_version", "Version that it samples with.", version)
        yield gauge("worker_leases", "Leases that are being sampled.", leases)
        yield counter("worker_tokens", "Output tokens of sampled leases.", state["tokens"])
        yield counter("worker_busy_seconds", "Seconds with a lease to sample.", state["busy_s"])
        yield counter("worker_loads", "Versions loaded.", state["loads"])
        text = "Seconds in which loads kept it from sampling."
        yield counter("worker_pause_seconds", text, state["pause_s"])
        text = "Submissions, by the coordinator's answer, before any verdict."
        yield counter("worker_submissions", text, answers, "answer")

    def state(self) -> dict[str, int | float]:
        """Return the heartbeat: `version` (-1 before the first), `busy_s`, `tokens`, `loads` with
        the sum of their `pause_s`, and `uptime_s`."""
        with self._lock:
            now = time.monotonic()
            running = now - self._busy_since if self._leases else 0.0
            return {
                "version": self._version,
                "busy_s": self._busy_s + running,
                "tokens": self._tokens,
                "loads": self._loads,
                "pause_s": self._pause_s,
                "uptime_s": now - self._started,
            }
