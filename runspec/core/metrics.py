"""Figures of a role for Prometheus: their names, and the server that shows them.

    runspec_<role>_<what>_<unit>

Units are seconds and bytes, and a counter ends in _total. What there are several of, as of checks
or stages, is a label. Coordinator, origin and relays have `/metrics` at their own address; origin
and relays have `broadcast` in the place of the role. The other roles call `serve_metrics`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from typing import TypeVar

from prometheus_client import CollectorRegistry, ProcessCollector, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from runspec.core.address import parse_address
from runspec.core.errors import UserError

PREFIX = "runspec_"
Value = float | Mapping[str, float] | None
"""A number, numbers by the value of a label, or None where there is none yet."""
_Family = TypeVar("_Family", GaugeMetricFamily, CounterMetricFamily)


def gauge(name: str, text: str, value: Value, label: str | None = None) -> GaugeMetricFamily:
    """Return a figure that goes up and down.

    Args:
        name: without the prefix.
        text: what it is.
        value: the figure.
        label: name of the label, where `value` is a mapping.
    """
    return _filled(GaugeMetricFamily(PREFIX + name, text, labels=_labels(label)), value)


def counter(name: str, text: str, value: Value, label: str | None = None) -> CounterMetricFamily:
    """Return a figure that only grows; Prometheus sees its name with _total.

    Args:
        name, text, value, label: see `gauge`.
    """
    return _filled(CounterMetricFamily(PREFIX + name, text, labels=_labels(label)), value)


def _labels(label: str | None) -> list[str]:
    return [] if label is None else [label]


def _filled(family: _Family, value: Value) -> _Family:
    if isinstance(value, Mapping):
        for of, each in value.items():
            family.add_metric([of], each)
    elif value is not None:
        family.add_metric([], value)
    return family


def serve_metrics(listen: str | None, figures: Collector, log: logging.Logger) -> None:
    """Serve a role's figures, and those of its process, until the process ends.

    The role does not wait: daemon threads bind the address and answer. Without the address the
    figures are lost, one warning says so, and the role goes on.

    Args:
        listen: HOST:PORT; None: nowhere.
        figures: read at each request, by another thread than the role's.
        log: the role's.
    """
    if listen is not None:
        target, given = _serve, (listen, figures, log)
        threading.Thread(target=target, args=given, name="metrics", daemon=True).start()


def _serve(listen: str, figures: Collector, log: logging.Logger) -> None:
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    registry.register(figures)
    try:
        host, port = parse_address(listen)
        start_http_server(port, host, registry=registry)  # it may look its own name up, slowly
    except (OSError, UserError) as error:
        log.warning("no metrics at %s, going on without: %s", listen, error)
