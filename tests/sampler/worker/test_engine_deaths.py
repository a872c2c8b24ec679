"""Engines that die: one is started anew and samples the same again, a second death is the end."""

from __future__ import annotations

import pytest

from sampler.engine.engine import EngineDied
from tests.sampler.worker.works import Works
from tests.waiting import eventually


def test_an_engine_that_died_is_started_once_and_samples_the_same_again(
    works: Works, caplog: pytest.LogCaptureFixture
):
    member = works.busy()

    member.engine.die()

    eventually(lambda: len(member.engine.submitted) == 4, "both are sampled again")
    assert member.engine.submitted[2:] == member.engine.submitted[:2]
    assert [version for version, _ in member.engine.loads] == [0, 0]
    member.engine.at_once = True
    member.engine.finish()
    eventually(lambda: len(works.submissions()) >= 2, "both are handed in")
    assert "sampling 2 leases again with a new one" in caplog.text


def test_a_second_death_under_the_same_lease_stops_the_worker_with_its_message(works: Works):
    member = works.member()
    member.engine.at_once = False
    member.start()
    for deaths in (2, 4):
        eventually(lambda n=deaths: len(member.engine.submitted) == n, "leases are in the engine")
        member.engine.die()

    eventually(member.ended, "its end")
    assert isinstance(member.failure, EngineDied)
    assert "the engine core ended" in str(member.failure)
    assert works.submissions() == []


def test_an_engine_that_dies_just_before_it_is_given_a_lease_is_started_once(
    works: Works, caplog: pytest.LogCaptureFixture
):
    # given an engine that dies after the worker has looked at it
    member = works.member()
    member.engine.deaths_before_submit = 1

    member.start()

    # then it is started again, and the same lease is sampled and handed in
    eventually(lambda: len(works.submissions()) >= 2, "work of the new engine")
    assert [version for version, _ in member.engine.loads] == [0, 0]
    assert "sampling 1 leases again with a new one" in caplog.text
    assert member.failure is None
