"""Figures of the newest evaluations, for Prometheus."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from runspec.core.metrics import PREFIX, counter, gauge
from verify.formats.evaluation import Evaluated


class Results(Collector):
    """The newest result of each evaluation.

    Args:
        done: evaluations that have a result already, and its version.
    """

    def __init__(self, done: Iterable[tuple[str, int]]) -> None:
        self._versions: dict[str, float] = {}
        for name, version in done:
            self._versions[name] = max(version, self._versions.get(name, -1))
        self._newest: dict[str, Evaluated] = {}
        self._busy_s = 0.0

    def evaluated(self, result: Evaluated) -> None:
        """Note a result that the coordinator has."""
        self._versions[result.evaluation] = result.version
        self._newest[result.evaluation] = result
        self._busy_s += result.wall_s

    def collect(self) -> Iterator[Metric]:
        """Yield the figures since the process began, and the newest version of each evaluation."""
        text, versions = "Newest version that was evaluated.", dict(self._versions)
        yield gauge("evaluator_newest_version", text, versions, "evaluation")
        yield counter("evaluator_busy_seconds", "Seconds spent on evaluations.", self._busy_s)
        text = "Figures of the newest version, with the ends of their 95 % intervals."
        labels = ["evaluation", "figure", "bound"]
        figures = GaugeMetricFamily(f"{PREFIX}evaluator_figure", text, labels=labels)
        for name, result in dict(self._newest).items():
            for figure, found in result.figures.items():
                bounds = {"estimate": found.value, "low": found.low, "high": found.high}
                for bound, value in bounds.items():
                    if value is not None:
                        figures.add_metric([name, figure, bound], value)
        yield figures
