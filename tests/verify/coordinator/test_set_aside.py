"""Submissions at which validators fail: what becomes of their groups, and of their workers."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from runspec.core.keys import SigningKey
from runspec.core.spec.resolved import load_resolved
from tests.verify.coordinator.deployment import DEADLINE_S, Site, submission, tiny_spec, verdict
from tests.verify.coordinator.filled import Filled, digest, key
from verify.audit.replay import audit
from verify.audit.set_aside import read_set_aside
from verify.client import CoordinatorClient, WorkItem
from verify.coordinator.claims import ATTEMPTS
from verify.coordinator.events import FailedAttempt, KeyBanned, SubmissionSetAside
from verify.coordinator.reputation import BAN_AFTER
from verify.coordinator.state import LeaseRecord
from verify.coordinator.transitions import IllegalTransition
from verify.formats.layout import STATE_FILE
from verify.formats.lease import open_lease
from verify.formats.submission import open_submission
from verify.ledger import Ledger

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


def test_only_what_waits_for_a_verdict_is_set_aside_and_with_a_reason(run: Filled) -> None:
    judged = run.work("w")
    with pytest.raises(IllegalTransition, match="is not submitted"):
        set_aside(run, judged)
    waiting = submitted(run, "w")
    with pytest.raises(IllegalTransition, match="nobody failed"):
        set_aside(run, waiting, ())
    set_aside(run, waiting)
    with pytest.raises(IllegalTransition, match="is not submitted"):
        run.judge(waiting, ["usable"] * 2)


# -- a coordinator at work -----------------------------------------------------------------------


@pytest.fixture
def site(tmp_path: Path) -> Site:
    site = Site(tmp_path, tiny_spec())
    site.publish(0)
    return site


def hand_in(site: Site, key: SigningKey, client: CoordinatorClient, note: int) -> str:
    data = client.lease(DEADLINE_S)
    assert data is not None
    lease = open_lease(data, coordinators=frozenset({site.coordinator.public_hex}))
    envelope, table = submission(data, lease, key, note=note)
    client.submit(envelope, table)
    return open_submission(envelope).digest


def judge(site: Site, validator: CoordinatorClient, item: WorkItem) -> None:
    lease = open_lease(item.lease, coordinators=frozenset({site.coordinator.public_hex}))
    validator.verdict(*verdict(item.submission, lease, site.validator))


def status(site: Site) -> dict:
    return httpx.get(f"{site.url}/v1/status", trust_env=False).json()


def test_a_poison_file_ends_three_validators_and_no_other_submission_is_lost(site: Site) -> None:
    with site.origin(), site.serving():
        key, worker = site.worker()
        poison = hand_in(site, key, worker, note=0)
        judged = []
        for death in range(ATTEMPTS):
            # a validator's process claims it, and ends
            dies = site.client(site.validator)
            item = dies.next_submission(DEADLINE_S)
            assert item is not None and item.submission == poison
            assert dies.next_submission(0.0) is None
            assert status(site)["queue"]["suspects"] == (death > 0)

            # the next one judges what else there is, and first of all
            judged.append(hand_in(site, key, worker, note=death + 1))
            lives = site.client(site.validator)
            item = lives.next_submission(DEADLINE_S)
            assert item is not None and item.submission == judged[-1]
            judge(site, lives, item)

        told = status(site)
        (aside,) = told["set_aside"]
        assert aside["submission"] == poison and len(aside["attempts"]) == ATTEMPTS
        assert told["queue"] == {"to_judge": 0, "claimed": 0, "suspects": 0}
        assert told["workers"][0]["accepted_rollouts"] == 4 * ATTEMPTS
        assert told["rejected_submissions"] == 0

    # and the ledger says so, to the next process and to an audit
    with site.origin(), site.serving():
        assert status(site)["set_aside"] == [aside]
    report = audit(site.run_dir, root_key=site.root.public_hex)
    assert report.findings == []
    ledger = Ledger(site.run_dir / STATE_FILE)
    assert sum(isinstance(event, SubmissionSetAside) for event in ledger.events()) == 1
    ledger.close()
    read = read_set_aside(site.run_dir, load_resolved(site.run_dir))
    assert read.count == 1 and read.last_at is not None
    assert read.last_at >= aside["attempts"][-1]["at"]


def test_a_validator_says_what_it_fails_at_and_what_it_gives_back(site: Site) -> None:
    with site.origin(), site.serving():
        key, worker = site.worker()
        first, second = (hand_in(site, key, worker, note=note) for note in range(2))
        validator = site.client(site.validator)
        for _ in range(2):
            assert validator.next_submission(DEADLINE_S) is not None

        validator.release_claims([first])
        validator.release_claims([second], "ValueError in check bounds")

        assert status(site)["queue"] == {"to_judge": 2, "claimed": 0, "suspects": 1}
        item = validator.next_submission(DEADLINE_S)
        assert item is not None and item.submission == first
