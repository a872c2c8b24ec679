"""Submissions go out in order, a bounded number at a time, and their failures come to light."""

from __future__ import annotations

import logging
import threading

import pytest

from sampler.worker.submitter import Submitter
from tests.waiting import eventually
from verify.client import RunFinished, SubmissionRefused

LOG = logging.getLogger("test")
DEADLINE_S = 10.0


def test_leases_are_finished_in_order_and_each_is_told():
    told: list[str] = []
    submitter, finished = Submitter(LOG, told.append), []

    for name in "abc":
        submitter.add(name, lambda name=name: finished.append(name))
    assert submitter.drain(DEADLINE_S)

    assert finished == ["a", "b", "c"]
    eventually(lambda: told == finished, "all three are told")


def test_draining_waits_for_what_is_queued_and_no_longer_than_allowed():
    submitter, gate, finished = Submitter(LOG), threading.Event(), []
    assert submitter.drain(0.0)  # nothing is open

    submitter.add("a", lambda: gate.wait(DEADLINE_S))
    submitter.add("b", lambda: finished.append("b"))
    assert not submitter.drain(0.05)
    gate.set()

    assert submitter.drain(DEADLINE_S)
    assert finished == ["b"]


def test_a_refused_submission_is_logged_and_work_goes_on(caplog):
    submitter, finished = Submitter(LOG), []

    def refused():
        raise SubmissionRefused("the lease expired")

    submitter.add("a", refused)
    submitter.add("b", lambda: finished.append("b"))
    assert submitter.drain(DEADLINE_S)

    submitter.check()
    assert finished == ["b"]
    assert "the lease expired" in caplog.text


@pytest.mark.parametrize("failure", [RunFinished("done"), OSError("disk")])
def test_any_other_failure_is_raised_to_the_worker(failure):
    submitter = Submitter(LOG)

    def failing():
        raise failure

    submitter.add("a", failing)
    assert submitter.drain(DEADLINE_S)

    with pytest.raises(type(failure), match=str(failure)):
        submitter.check()
