"""The worker's loop: leases, versions that change between them, engines that die, and its end."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest

from runspec.core.errors import UserError
from runspec.core.keys import SigningKey
from sampler.engine.engine import EngineDied
from tests.figures import figures_of
from tests.sampler.worker.obedient import LENGTH
from tests.sampler.worker.works import Works, site_of, spec_with
from tests.waiting import eventually
from verify.client import CoordinatorClient, RunFinished, SubmissionRefused


def test_weights_that_fail_their_checks_stop_the_worker_with_the_tensors_name(works: Works):
    member = works.member()
    member.engine.refuses = UserError("other bytes in model.layers.0.mlp.gate_proj.weight")

    member.start(loaded=3)  # and the leases are of version 0

    eventually(member.ended, "its end")
    assert "model.layers.0.mlp.gate_proj.weight" in str(member.failure)
    assert (member.engine.submitted, works.submissions()) == ([], [])


def test_an_untrusted_pool_never_changes_a_version_under_a_rollout(works: Works):
    member = works.busy(loaded=3)

    member.shelf.newest = 4
    member.engine.finish()

    eventually(lambda: len(member.engine.submitted) >= 3, "the next lease is in the engine")
    assert member.engine.loads == [(3, 0), (0, 0)]


def test_a_pool_with_in_flight_updates_takes_a_version_over_in_the_middle(tmp_path: Path):
    spec = spec_with(in_flight_updates=True, trust="trusted")
    with site_of(tmp_path, spec) as works, works.site.serving():
        member = works.busy()

        member.shelf.newest = 1

        eventually(lambda: member.engine.version == 1, "version 1 is loaded")
        assert member.engine.loads[1] == (1, 8)
        member.engine.at_once = True
        member.engine.finish()
        eventually(lambda: len(works.submissions()) >= 2, "both are handed in")
        (first, *_) = [row for rows in works.rows() for row in rows]
        assert (first.version, first.versions.tolist()) == (0, [1] * LENGTH)
        member.leave()


def test_a_submission_that_is_refused_is_logged_and_work_goes_on(
    works: Works, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    submit, refusals = CoordinatorClient.submit, iter([SubmissionRefused("the lease expired")])

    def first_refused(client: CoordinatorClient, envelope: bytes, table: bytes) -> None:
        for refusal in refusals:
            raise refusal
        submit(client, envelope, table)

    monkeypatch.setattr(CoordinatorClient, "submit", first_refused)
    member = works.member()
    member.start()

    eventually(lambda: len(works.submissions()) >= 2, "the next ones are taken")
    assert "the lease expired" in caplog.text
    assert not member.ended()
    # and Prometheus sees both answers
    answers = figures_of(member.meter)
    assert answers["runspec_worker_submissions_total/refused"] == 1.0
    assert answers["runspec_worker_submissions_total/accepted"] >= 1.0


@pytest.mark.parametrize("failure", [RunFinished("done"), UserError("the disk is full")])
def test_how_a_submission_ends_the_worker(
    works: Works, monkeypatch: pytest.MonkeyPatch, failure: Exception
):
    """The end of the run is no failure; whatever else goes wrong is told."""

    def failing(client: CoordinatorClient, envelope: bytes, table: bytes) -> None:
        raise failure

    monkeypatch.setattr(CoordinatorClient, "submit", failing)
    member = works.member()
    member.start()

    eventually(member.ended, "its end")
    assert member.failure is (failure if isinstance(failure, UserError) else None)


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
    # Two threads find the death, at once or one after the other.
    found = re.findall(r"sampling (\d) leases again with a new one", caplog.text)
    assert sum(map(int, found)) == 2


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


def test_a_worker_that_leaves_gives_its_leases_back_and_gets_others_when_it_returns(
    works: Works, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.INFO)
    key = SigningKey.generate()
    first = works.busy(key)

    first.leave()

    assert "stopped; 2 leases were given back" in caplog.text
    assert first.failure is None
    second = works.busy(key)
    assert not any(each in first.engine.submitted for each in second.engine.submitted)
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
