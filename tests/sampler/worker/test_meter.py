"""The meter counts work while it goes on, so that a long generation shows before its end."""

from __future__ import annotations

import threading
import time

from sampler.worker.meter import Meter


def test_a_new_worker_has_done_nothing():
    state = Meter().state()

    assert (state["version"], state["busy_s"], state["tokens"]) == (-1, 0.0, 0)


def test_busy_time_counts_while_the_work_runs_and_never_more_than_the_uptime():
    meter, running, end = Meter(), threading.Event(), threading.Event()

    def work():
        with meter.busy():
            running.set()
            end.wait(10.0)

    thread = threading.Thread(target=work)
    thread.start()
    assert running.wait(10.0)
    deadline = time.monotonic() + 10.0
    while meter.state()["busy_s"] == 0.0:
        assert time.monotonic() < deadline
    during = meter.state()
    end.set()
    thread.join()
    after = meter.state()

    assert 0.0 < during["busy_s"] <= during["uptime_s"]
    assert during["busy_s"] <= after["busy_s"] <= after["uptime_s"]
    assert meter.state()["busy_s"] == after["busy_s"]


def test_tokens_and_version_are_told():
    meter = Meter()

    meter.add_tokens(5)
    meter.add_tokens(7)
    meter.set_version(3)

    assert (meter.state()["tokens"], meter.state()["version"]) == (12, 3)
