"""Submissions at which validators fail: their groups and their workers."""

from __future__ import annotations

from contextlib import closing

import pytest

from runspec.core.run_files import STATE_FILE
from runspec.core.spec.resolved import load_resolved
from tests.verify.coordinator.deployment import DEADLINE_S, Site
from tests.verify.coordinator.filled import Filled, digest, key
from tests.verify.coordinator.over_http import check, sample, status
from verify.audit.replay import audit
from verify.coordinator.ledger.ledger import Ledger
from verify.coordinator.ledger.snapshot import read_dropped
from verify.coordinator.machine.events import FailedAttempt, KeyBanned, SubmissionSetAside
from verify.coordinator.machine.reputation import BAN_AFTER
from verify.coordinator.machine.state import LeaseRecord
from verify.coordinator.services.claims import ATTEMPTS

DIED = (FailedAttempt(1.0, "ab" * 32, "the validator's process ended"),)


@pytest.fixture
def run() -> Filled:
    run = Filled()
    for name in ("w", "x"):
        run.register(name)
    run.publish(0)
    return run


def set_aside(run: Filled, record: LeaseRecord, attempts: tuple[FailedAttempt, ...] = DIED) -> None:
    run.record(SubmissionSetAside(run.now, record.digest, digest("s", record.digest), attempts))


def submitted(run: Filled, name: str) -> LeaseRecord:
    record = run.lease(name)
    assert record is not None
    run.submit(record)
    return record


def test_its_groups_are_leased_again_and_the_step_closes_without_it(run: Filled) -> None:
    # given a step whose first submission nobody can judge, and others after it
    poison = submitted(run, "w")
    run.work("x")
    assert run.advance() == []

    # when it is set aside
    set_aside(run, poison)

    # then another worker gets its groups, and the step closes as complete
    run.work("x")
    tally = run.state.tallies[0]
    (closed,) = run.advance()
    assert closed.complete and poison.digest not in {g.lease for g in closed.groups}
    assert (tally.set_aside_groups, tally.rejected_submissions) == (2, 0)


def test_one_is_no_rejection_but_many_of_one_worker_are_stopped(run: Filled) -> None:
    set_aside(run, submitted(run, "w"))
    standing = run.state.workers[key("w")].standing
    assert (standing.rejected, standing.withheld, standing.quarantine) == (0, 0, None)

    set_aside(run, submitted(run, "w"))
    assert "set aside" in str(run.state.workers[key("w")].standing.quarantine)

    while key("w") not in run.state.bans:
        set_aside(run, submitted(run, "w"))
    count = sum(isinstance(event, SubmissionSetAside) for event in run.events)
    (ban,) = (event for event in run.events if isinstance(event, KeyBanned))
    assert count == BAN_AFTER and "validators came to no verdict" in ban.reason


# -- a coordinator at work -----------------------------------------------------------------------


def test_a_poison_file_ends_three_validators_in_all_and_no_other_submission_is_lost(
    site: Site,
) -> None:
    with site.serving():
        key, worker = site.worker()
        poison, _ = sample(site, key, worker)
        for death in range(ATTEMPTS):
            # a validator's process claims it, and ends
            item = site.client(site.validator).next_submission(DEADLINE_S)
            assert item is not None and item.submission == poison
            assert status(site)["set_aside"] == []
            # the next one judges what else there is, and first of all
            other, _ = sample(site, key, site.client(key), note=death + 1)
            assert check(site, site.client(site.validator)) == other
        told = status(site)

    (aside,) = told["set_aside"]
    assert aside["submission"] == poison and len(aside["attempts"]) == ATTEMPTS
    assert told["queue"] == {"to_judge": 0, "claimed": 0, "suspects": 0}
    assert told["workers"][0]["accepted_rollouts"] == 4 * ATTEMPTS
    assert told["rejected_submissions"] == 0

    # and the ledger says so, to the next process and to an audit
    with site.serving():
        assert status(site)["set_aside"] == [aside]
    assert audit(site.run_dir, root_key=site.root.public_hex).findings == []
    with closing(Ledger(site.run_dir / STATE_FILE)) as ledger:
        assert sum(isinstance(event, SubmissionSetAside) for event in ledger.events()) == 1
    read = read_dropped(site.run_dir, load_resolved(site.run_dir))
    assert read.set_aside == 1 and read.set_aside_at is not None
    assert read.set_aside_at >= aside["attempts"][-1]["at"]


def test_a_validator_says_what_it_fails_at_and_what_it_gives_back(site: Site) -> None:
    with site.serving():
        worker = site.worker()
        first, second = (sample(site, *worker, note=note)[0] for note in range(2))
        validator = site.client(site.validator)
        for _ in range(2):
            assert validator.next_submission(DEADLINE_S) is not None

        validator.release_claims([first])
        validator.release_claims([second], "ValueError in check bounds")

        assert status(site)["queue"] == {"to_judge": 2, "claimed": 0, "suspects": 1}
        item = validator.next_submission(DEADLINE_S)
        assert item is not None and item.submission == first
