"""The loop: leases in the engine one ahead of the other, and versions that change between them."""

from __future__ import annotations

from pathlib import Path

import pytest

from runspec.core.errors import UserError
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
