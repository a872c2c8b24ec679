"""When a worker says that it lives: at once, every ten seconds, and when it loaded a version."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from runspec.core.errors import UserError
from sampler.worker import start
from sampler.worker.meter import Meter
from tests.figures import figures_of
from tests.waiting import eventually
from verify.client import RunFinished
from verify.coordinator.edge.limits import RATES
from verify.coordinator.services.activity import DEAD_AFTER_S

LOG = logging.getLogger("worker")


class Heard:
    """A coordinator that only listens."""

    def __init__(self, *troubles: Exception) -> None:
        self.troubles = list(troubles)
        self.states: list[dict[str, float]] = []

    def heartbeat(self, state: dict[str, float]) -> None:
        self.states.append(state)
        if self.troubles:
            raise self.troubles.pop(0)


@contextmanager
def beating(heard: Heard, meter: Meter) -> Iterator[threading.Thread]:
    stop = threading.Event()
    thread = threading.Thread(target=start._heartbeats, args=(heard, meter, stop, LOG))
    thread.start()
    yield thread
    stop.set()
    thread.join(30)
    assert not thread.is_alive()


def test_three_missed_heartbeats_are_death() -> None:
    assert 3 * start.HEARTBEAT_S == DEAD_AFTER_S


def test_the_coordinator_takes_all_that_a_worker_sends_however_often_it_loads() -> None:
    taken = RATES["key", "heartbeat"].per_s
    assert taken * start._LOOK_S >= 2.0  # between two of a worker's


def test_the_first_comes_at_once_and_a_load_is_told_soon(monkeypatch) -> None:
    monkeypatch.setattr(start, "HEARTBEAT_S", 3600.0)
    monkeypatch.setattr(start, "_LOOK_S", 0.001)
    heard, meter = Heard(), Meter()
    with beating(heard, meter):
        eventually(lambda: heard.states, "a first heartbeat")
        meter.loaded(3, 0.5)
        eventually(lambda: len(heard.states) == 2, "a heartbeat that tells of the load")
    assert [state["version"] for state in heard.states] == [-1, 3]


def test_they_go_on_after_a_coordinator_that_was_away_and_end_with_the_run(
    monkeypatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(start, "HEARTBEAT_S", 0.002)
    monkeypatch.setattr(start, "_LOOK_S", 0.001)
    heard = Heard(UserError("is away"), RunFinished())
    with caplog.at_level(logging.WARNING), beating(heard, Meter()) as thread:
        thread.join(30)
        assert not thread.is_alive()
    assert len(heard.states) == 2 and "heartbeat: is away" in caplog.text


def test_the_meter_counts_busy_time_while_any_lease_is_sampled() -> None:
    meter = Meter()
    assert (meter.state()["version"], meter.state()["busy_s"]) == (-1, 0.0)

    meter.lease_began()
    meter.lease_began()
    meter.lease_ended(5)
    eventually(lambda: meter.state()["busy_s"] > 0.0, "time that counts before the end")
    meter.lease_ended(7)
    meter.loaded(2, 0.5)
    meter.loaded(3, 0.25)

    state = meter.state()
    assert 0.0 < state["busy_s"] <= state["uptime_s"]
    assert meter.state()["busy_s"] == state["busy_s"]
    told = [state[name] for name in ("tokens", "version", "loads", "pause_s")]
    assert told == [12, 3, 2, 0.75]
    # and Prometheus sees the same
    figures = figures_of(meter)
    assert figures["runspec_worker_tokens_total"] == 12.0
    assert figures["runspec_worker_version"] == 3.0
    assert figures["runspec_worker_busy_seconds_total"] == state["busy_s"]
    assert figures["runspec_worker_leases"] == 0.0
