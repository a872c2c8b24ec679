"""The real server over HTTP: a run and what ends it, what validators claim, verdicts that fit."""

from __future__ import annotations

import json
import time
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path

import httpx
import pytest

from runspec.core.canonical import canonical_json
from runspec.core.errors import UserError
from runspec.core.files import write_atomic
from runspec.core.hashing import digest_bytes
from runspec.core.keys import SigningKey
from runspec.core.process import RunStopped
from runspec.core.run_files import submission_files
from runspec.core.spec.resolved import dump_resolved
from tests.ended_at_once import hears_sigterm_at_once
from tests.verify.coordinator.deployment import DEADLINE_S, Site, tiny_spec, verdict
from tests.verify.coordinator.filled import started
from tests.verify.coordinator.in_process import journal_of
from tests.verify.coordinator.over_http import check, granted, post, sample, status
from tests.waiting import eventually
from verify.client import RunFinished
from verify.coordinator.machine.reputation import WORKERS_GAPS
from verify.coordinator.services.judging import Judging
from verify.formats.lease import Lease
from verify.formats.verdict import decode_verdicts


def test_a_run_from_its_first_lease_to_its_last_batch(site: Site):
    with site.serving():
        key, worker = site.worker()
        validator = site.client(site.validator)
        assert worker.spec() == tiny_spec()
        worker.heartbeat({"version": 0, "busy_s": 1.5, "tokens": 100})
        validator.heartbeat({"busy_s": 0.0, "checked": 0})

        for step in range(3):
            submitted = [sample(site, key, worker) for _ in range(2)]
            judged = [check(site, validator) for _ in range(2)]
            batch = site.batch(step)
            site.publish(step + 1)

            assert judged == [digest for digest, _ in submitted]
            assert [(g.submission, g.group) for g in batch.groups] == [
                (digest, group) for digest, _ in submitted for group in (0, 1)
            ]
            assert batch.complete
            assert all(g.step == step and step - g.version <= 1 for g in batch.groups)
            for group in batch.groups:
                files = submission_files(site.run_dir, step, group.submission)
                assert digest_bytes(files.submission.read_bytes()) == group.submission
                assert digest_bytes(files.verdict.read_bytes()) == group.verdict
                assert len(decode_verdicts(files.verdict.read_bytes())) == 4

        stats = batch.stats
        assert stats["graded_groups"] == stats["leased_groups"] == 4
        assert stats["accepted_rollouts"] == 8
        assert stats["task_reward_mean"] == 0.5 and stats["reward_mean"] == 0.0
        assert stats["length_mean"] == 5.0 and stats["length_error_mean"] == 3.0
        assert stats["logprob_diff_mean"] == 0.25
        assert stats["by_target"] == {
            "8": {"rollouts": 8, "task_reward_mean": 0.5, "length_mean": 5.0}
        }
        for ask in (worker.lease, validator.next_submission):
            with pytest.raises(RunFinished):
                ask(DEADLINE_S)
        told = status(site)
        assert (told["state"], told["steps_closed"]) == ("finished", 3)
        assert told["workers"][0]["accepted_tokens"] == 3 * 8 * 5
        assert told["workers"][0]["state"]["tokens"] == 100
        metrics = httpx.get(f"{site.url}/metrics", trust_env=False).text
        assert "runspec_coordinator_accepted_rollouts_total 24.0" in metrics


def test_a_stalled_step_ends_the_server_with_the_reason(tmp_path: Path):
    spec = tiny_spec(lease_timeout="50ms")
    fill = spec.algorithm.fill.model_copy(update={"max_groups": 1.0})
    algorithm = spec.algorithm.model_copy(update={"fill": fill})
    spec = spec.model_copy(update={"algorithm": algorithm})
    site = Site(tmp_path, spec)
    site.publish(0)
    with site.origin(), site.serving() as server:
        _, worker = site.worker()
        for _ in range(2):  # all that a step may lease, and nothing is delivered
            granted(site, worker)

        eventually(server.done, "the server ends")

        error = server.exception()
        assert isinstance(error, RunStopped)
        assert "step 0 stalled: 0 of 4 groups, at least 2 needed" in str(error)
        assert "4 groups withheld or late" in str(error)


def test_a_version_that_the_ledger_knows_nothing_of_stops_the_run(site: Site):
    site.publish(5)
    with site.serving() as server:
        eventually(server.done, "the server ends")

        assert "version 5 is published, but by the ledger only 0 steps are closed" in str(
            server.exception()
        )


def test_the_spec_must_fit_the_keys(site: Site):
    write_atomic(site.run_dir / "spec.json", dump_resolved(tiny_spec(steps=5)))
    roles = json.loads((site.run_dir / "keys" / "roles.json").read_bytes())
    roles["payload"]["roles"]["coordinator"] = [SigningKey.generate().public_hex]
    write_atomic(site.run_dir / "keys" / "roles.json", canonical_json(roles))

    with pytest.raises(UserError, match=r"roles\.json: cannot be verified"), site.serving():
        pass


def test_who_knows_its_address_may_end_it_at_once(site: Site) -> None:
    assert hears_sigterm_at_once(site.server)


def test_a_claim_is_kept_by_heartbeats_and_offered_to_another_without_them(
    site: Site, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("verify.coordinator.services.claims.CLAIM_TIMEOUT_S", 0.5)
    other = SigningKey.generate()
    site.sign_roles(site.validator, other)
    with site.serving():
        key, worker = site.worker()
        digest, lease = sample(site, key, worker)
        slow, quick = site.client(site.validator), site.client(other)
        assert slow.next_submission(DEADLINE_S).submission == digest
        for _ in range(6):
            time.sleep(0.1)
            slow.heartbeat({"busy_s": 0.0, "checked": 0})
            assert quick.next_submission(0.0) is None

        assert quick.next_submission(DEADLINE_S).submission == digest  # it is heard of no more

        quick.verdict(*verdict(digest, lease, other))
        slow.verdict(*verdict(digest, lease, site.validator, accepted=False))  # too late to count
        told = status(site)
        assert told["rejected_submissions"] == 0
        assert told["workers"][0]["accepted_rollouts"] == 4


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
