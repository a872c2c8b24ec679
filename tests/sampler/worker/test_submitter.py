"""Submissions go out in order, a bounded number at a time, and their failures come to light."""

from __future__ import annotations

import logging
import threading

import pytest

from sampler.worker.submitter import MAX_IN_FLIGHT, Submitter
from verify.client import RunFinished, SubmissionRefused

LOG = logging.getLogger("test")
DEADLINE_S = 10.0


def test_leases_are_finished_in_order():
    submitter, finished = Submitter(LOG), []

    for name in "abc":
        submitter.add(name, lambda name=name: finished.append(name))
    submitter.wait("c", DEADLINE_S)

    assert finished == ["a", "b", "c"]
    assert not submitter.is_open("c")


def test_a_lease_is_open_until_it_is_handed_in():
    submitter, gate = Submitter(LOG), threading.Event()

    submitter.add("a", lambda: gate.wait(DEADLINE_S))
    assert submitter.is_open("a")
    gate.set()
    submitter.wait("a", DEADLINE_S)

    assert not submitter.is_open("a")


def test_draining_waits_for_what_is_queued_and_no_longer_than_allowed():
    submitter, gate, finished = Submitter(LOG), threading.Event(), []
    assert submitter.drain(0.0)  # nothing is open

    submitter.add("a", lambda: gate.wait(DEADLINE_S))
    submitter.add("b", lambda: finished.append("b"))
    assert not submitter.drain(0.05)
    gate.set()

    assert submitter.drain(DEADLINE_S)
    assert finished == ["b"]


def test_no_more_than_the_limit_are_in_flight():
    submitter, gate, added = Submitter(LOG), threading.Event(), threading.Event()
    started = threading.Event()

    def first():
        started.set()
        gate.wait(DEADLINE_S)

    submitter.add("0", first)
    assert started.wait(DEADLINE_S)  # one is being handed in, and leaves its place in the queue
    for number in range(1, MAX_IN_FLIGHT):
        submitter.add(str(number), lambda: None)

    def one_too_many():
        submitter.add("last", lambda: None)
        added.set()

    thread = threading.Thread(target=one_too_many)
    thread.start()
    assert not added.wait(0.1)
    gate.set()
    assert added.wait(DEADLINE_S)
    thread.join()


def test_a_refused_submission_is_logged_and_work_goes_on(caplog):
    submitter, finished = Submitter(LOG), []

    def refused():
        raise SubmissionRefused("the lease expired")

    submitter.add("a", refused)
    submitter.add("b", lambda: finished.append("b"))
    submitter.wait("b", DEADLINE_S)

    submitter.check()
    assert finished == ["b"]
    assert "the lease expired" in caplog.text


@pytest.mark.parametrize("failure", [RunFinished("done"), OSError("disk")])
def test_any_other_failure_is_raised_to_the_worker(failure):
    submitter = Submitter(LOG)

    def failing():
        raise failure

    submitter.add("a", failing)
    submitter.wait("a", DEADLINE_S)

    with pytest.raises(type(failure), match=str(failure)):
        submitter.check()
