"""The meter counts work while it goes on, so that a long generation shows before its end."""

from __future__ import annotations

import time

from sampler.worker.meter import Meter


def test_a_new_worker_has_done_nothing():
    state = Meter().state()

    assert (state["version"], state["busy_s"], state["tokens"]) == (-1, 0.0, 0)


def test_busy_time_counts_while_any_lease_is_sampled_and_never_more_than_the_uptime():
    meter = Meter()

    meter.lease_began()
    meter.lease_began()
    meter.lease_ended()
    during = _busy_beyond(meter, 0.0)
    meter.lease_ended()
    after = meter.state()

    assert 0.0 < during["busy_s"] <= during["uptime_s"]
    assert during["busy_s"] <= after["busy_s"] <= after["uptime_s"]
    assert meter.state()["busy_s"] == after["busy_s"]


def _busy_beyond(meter, seconds):
    deadline = time.monotonic() + 10.0
    while (state := meter.state())["busy_s"] <= seconds:
        assert time.monotonic() < deadline
    return state


def test_tokens_and_loads_are_told():
    meter = Meter()

    for tokens in (5, 7):
        meter.lease_began()
        meter.lease_ended(tokens)
    meter.loaded(2, 0.5)
    meter.loaded(3, 0.25)

    state = meter.state()
    assert (state["tokens"], state["version"]) == (12, 3)
    assert (state["loads"], state["pause_s"]) == (2, 0.75)
