"""Validators: what they are offered and claim, and verdicts that fit or do not."""

from __future__ import annotations

import time
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from runspec.core.keys import SigningKey
from tests.verify.coordinator.deployment import DEADLINE_S, Site, tiny_spec, verdict
from tests.verify.coordinator.filled import started
from tests.verify.coordinator.over_http import post, sample, status
from tests.verify.coordinator.services import journal_of
from verify.coordinator.judging import Judging
from verify.coordinator.reputation import WORKERS_GAPS
from verify.formats.lease import Lease


def test_a_claim_without_a_verdict_is_offered_to_another_validator(tmp_path: Path):
    site = Site(tmp_path, tiny_spec())
    site.publish(0)
    other = SigningKey.generate()
    site.sign_roles(site.validator, other)
    with site.origin(), site.serving(claim_timeout_s=0.05):
        key, worker = site.worker()
        digest, lease = sample(site, key, worker)
        slow, quick = site.client(site.validator), site.client(other)
        assert slow.next_submission(DEADLINE_S).submission == digest

        assert quick.next_submission(DEADLINE_S).submission == digest

        quick.verdict(*verdict(digest, lease, other))
        slow.verdict(*verdict(digest, lease, site.validator, accepted=False))  # too late to count
        told = status(site)
        assert told["rejected_submissions"] == 0
        assert told["workers"][0]["accepted_rollouts"] == 4


def test_a_validator_that_is_at_a_long_prefill_keeps_its_claim_while_it_is_heard_of(tmp_path: Path):
    site = Site(tmp_path, tiny_spec())
    site.publish(0)
    other = SigningKey.generate()
    site.sign_roles(site.validator, other)
    with site.origin(), site.serving(claim_timeout_s=2.0):
        key, worker = site.worker()
        digest, _ = sample(site, key, worker)
        slow, idle = site.client(site.validator), site.client(other)
        assert slow.next_submission(DEADLINE_S).submission == digest

        for _ in range(6):
            time.sleep(0.5)
            slow.heartbeat({"busy_s": 0.0, "checked": 0})
            assert idle.next_submission(0.0) is None

        assert idle.next_submission(DEADLINE_S).submission == digest  # it is heard of no more


REPEATED = f"duplicates: row 0: 3 runs of tokens of submission {'ab' * 32}, which was judged before"


def _rejected(digest: str, lease: Lease, site: Site, reason: str) -> tuple[bytes, bytes]:
    return verdict(digest, lease, site.validator, accepted=False, reason=reason)


def test_verdicts_that_do_not_fit_are_refused(site: Site):
    with site.serving():
        key, worker = site.worker()
        digest, lease = sample(site, key, worker)
        validator = site.client(site.validator)
        envelope, table = verdict(digest, lease, site.validator)
        _, half = verdict(digest, replace(lease, groups=1), site.validator)
        other_step = replace(lease, step=1)
        rejected = partial(_rejected, digest, lease, site)
        huge = verdict(digest, lease, site.validator, gap_excess=1e308)  # each is finite
        nan = verdict(digest, lease, site.validator, task_rewards=(float("nan"), 1.0))

        for signed, body, words in (
            (*verdict(digest, lease, key), "may not sign it"),
            (envelope, half, "names another body"),
            (*verdict(digest, other_step, site.validator), "not the submission's"),
            (*verdict(digest, lease, site.validator, dropped=(2,)), "dropped_groups"),
            (*nan, "finite"),
            (*huge, "finite"),
            # what would not be the ledger's own words, so that an audit would find fault with it
            (*verdict(digest, lease, site.validator, reason="looks good"), "reason"),
            (*rejected(""), "reason"),
            (*rejected(f"{WORKERS_GAPS}: excess 2 nats"), "coordinator"),
            (*rejected(REPEATED), "coordinator"),
        ):
            answer = post(site, site.validator, "/v1/verdicts", body, envelope=signed)
            assert (answer.status_code, words in answer.json()["error"]) == (400, True), words

        validator.verdict(envelope, table)
        assert validator.next_submission(0.0) is None


@pytest.mark.parametrize(("async_level", "offered"), [(0, 0), (1, 1)])
def test_what_can_train_no_more_is_not_offered(tmp_path: Path, async_level: int, offered: int):
    # given a step that closed at its deadline without a submission that nobody had judged
    run = started(async_level=async_level)
    run.work("x")
    late = run.lease("y")
    run.submit(late)
    run.now += 101.0
    assert [close.step for close in run.advance()] == [0]
    # then it is offered only where a later step may still train it
    with closing(journal_of(run, tmp_path)) as journal:
        assert [r.digest for r in Judging(journal, "run").submitted()] == [late.digest] * offered
