"""A worker that is told to leave hands in what it has, and gives back the rest."""

from __future__ import annotations

import logging

import pytest

from runspec.core.keys import SigningKey
from tests.sampler.worker.works import Works
from tests.waiting import eventually


def test_a_worker_that_leaves_gives_its_leases_back_and_goes_on_with_them_when_it_returns(
    works: Works, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.INFO)
    key = SigningKey.generate()
    first = works.busy(key)

    first.leave()

    assert "stopped; 2 leases were given back" in caplog.text
    assert first.failure is None
    second = works.busy(key)
    assert second.engine.submitted == first.engine.submitted
    second.engine.at_once = True
    second.engine.finish()
    eventually(lambda: len(works.submissions()) >= 2, "both are handed in, once")


def test_what_is_sampled_when_it_is_told_to_leave_is_still_handed_in(works: Works):
    member = works.busy()

    member.stop.set()
    member.engine.finish()
    member.leave()

    assert len(works.submissions()) == 2


@pytest.mark.parametrize("dies", ["before", "during"])
def test_an_engine_that_dies_while_its_worker_leaves_is_not_started_again(
    works: Works, caplog: pytest.LogCaptureFixture, dies: str
):
    # given a worker that is told to leave
    caplog.set_level(logging.INFO)
    member = works.member()
    member.engine.at_once, member.engine.dies_of_abort = False, dies == "during"
    member.start()
    eventually(lambda: len(member.engine.submitted) == 2, "two leases are in the engine")
    member.stop.set()
    # when its engine dies, before or in the abort of what is left
    if dies == "before":
        eventually(lambda: member.leaving, "it leaves")
        member.engine.die()
    member.leave()
    # then it leaves all the same, and gives its leases back
    assert member.failure is None
    assert "stopped; 2 leases were given back" in caplog.text
    assert [version for version, _ in member.engine.loads] == [0]
