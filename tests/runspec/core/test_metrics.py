"""Figures of a role: served beside it, and never at its cost."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Iterator
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from runspec.core.metrics import counter, gauge, serve_metrics
from runspec.local.endpoints import port_answers
from tests.waiting import eventually

LOG = logging.getLogger("role")


class Figures(Collector):
    """Three figures, of which one is not known yet."""

    def __init__(self) -> None:
        self.broken = False

    def collect(self) -> Iterator[Metric]:
        if self.broken:
            raise RuntimeError("a figure is broken")
        yield gauge("worker_version", "Version.", 3)
        yield gauge("worker_unknown", "Not known.", None)
        yield counter("worker_submissions", "By answer.", {"accepted": 2, "refused": 0}, "answer")


@pytest.fixture
def port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def answer(port: int) -> list[str]:
    with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=20) as answered:
        return answered.read().decode().splitlines()


def test_a_role_has_its_figures_and_those_of_its_process(port: int) -> None:
    serve_metrics(f"127.0.0.1:{port}", Figures(), LOG)
    eventually(lambda: port_answers("127.0.0.1", port), "the server")
    lines = answer(port)
    assert "runspec_worker_version 3.0" in lines
    assert 'runspec_worker_submissions_total{answer="accepted"} 2.0' in lines
    # and what is not known has no value
    assert not any(line.startswith("runspec_worker_unknown ") for line in lines)
    assert any(line.startswith("process_resident_memory_bytes ") for line in lines)


def test_a_figure_that_breaks_costs_one_answer(port: int, capfd: pytest.CaptureFixture) -> None:
    figures = Figures()
    serve_metrics(f"127.0.0.1:{port}", figures, LOG)
    eventually(lambda: port_answers("127.0.0.1", port), "the server")
    figures.broken = True
    with pytest.raises(HTTPError):
        answer(port)
    figures.broken = False
    assert "runspec_worker_version 3.0" in answer(port)


@pytest.mark.parametrize("listen", ["taken", "192.0.2.1:8000", "8000"])
def test_without_its_address_a_role_goes_on_and_says_so(
    listen: str, port: int, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.create_server(("127.0.0.1", port)):
        listen = f"127.0.0.1:{port}" if listen == "taken" else listen
        with caplog.at_level(logging.WARNING):
            serve_metrics(listen, Figures(), LOG)
            eventually(lambda: caplog.records, "the warning")
    [record] = caplog.records
    assert record.getMessage().startswith(f"no metrics at {listen}, going on without: ")


def test_a_role_that_is_not_asked_serves_nothing() -> None:
    before = threading.active_count()
    serve_metrics(None, Figures(), LOG)
    assert threading.active_count() == before
