"""Figures of a publisher for Prometheus, since its process began."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from broadcast.manifest import WeightsManifest
from runspec.core.http_server import counter, gauge

STAGES = ("export", "compare", "publish")


class Published(Collector):
    """Versions published, their bytes, and where the time went.

    Args:
        served: versions in the store; the publisher adds to it.
    """

    def __init__(self, served: Collection[int]) -> None:
        self._served = served
        self._versions: Counter[str] = Counter({"whole": 0, "delta": 0})
        self._seconds = dict.fromkeys(STAGES, 0.0)
        self._bytes = 0

    def published(self, manifest: WeightsManifest, seconds: Mapping[str, float]) -> None:
        """Count a version that went out.

        Args:
            manifest: of the version.
            seconds: spent on it, by each of `STAGES`.
        """
        self._versions["whole" if manifest.is_anchor else "delta"] += 1
        files = [*manifest.objects.values(), *manifest.delta.values()]
        self._bytes += sum(each.size for each in files)
        for stage, spent in seconds.items():
            self._seconds[stage] += spent

    def collect(self) -> Iterator[Metric]:
        """Yield the figures."""
        newest = max(list(self._served), default=None)
        yield gauge("publisher_newest_version", "Newest version in the store.", newest)
        text, versions = "Versions published, by what went out.", dict(self._versions)
        yield counter("publisher_versions", text, versions, "format")
        text, seconds = "Seconds spent on versions, by stage.", dict(self._seconds)
        yield counter("publisher_stage_seconds", text, seconds, "stage")
        yield counter("publisher_published_bytes", "Bytes of versions published.", self._bytes)
