"""The real server over HTTP, real signatures, the real client: a run, and what ends it."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest

from runspec.core.canonical import canonical_json
from runspec.core.errors import UserError
from runspec.core.files import write_atomic
from runspec.core.hashing import digest_bytes
from runspec.core.keys import SigningKey
from runspec.core.process import RunStopped
from runspec.core.spec.resolved import dump_resolved
from tests.ended_at_once import hears_sigterm_at_once
from tests.verify.coordinator.deployment import DEADLINE_S, RUN, Site, tiny_spec
from tests.verify.coordinator.over_http import check, granted, sample, status
from tests.waiting import eventually
from verify.client import RunFinished
from verify.formats.layout import submission_files
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
        assert "coordinator_accepted_rollouts_total 24.0" in metrics


def test_a_worker_that_waits_is_answered_when_a_version_is_published(site: Site):
    (site.store / RUN / "latest.json").unlink()
    with site.serving():
        _, worker = site.worker()
        assert worker.lease(0.0) is None

        site.publish(0)

        assert granted(site, worker)[1].version == 0


def test_a_stalled_step_ends_the_server_with_the_reason(tmp_path: Path):
    spec = tiny_spec()
    fill = spec.algorithm.fill.model_copy(update={"deadline": 0.2})
    algorithm = spec.algorithm.model_copy(update={"fill": fill})
    spec = spec.model_copy(update={"algorithm": algorithm})
    site = Site(tmp_path, spec)
    site.publish(0)
    with site.origin(), site.serving() as server:
        key, worker = site.worker()
        granted(site, worker)

        eventually(server.done, "the server ends")

        error = server.exception()
        assert isinstance(error, RunStopped)
        assert "step 0 stalled: 0 of 4 groups, at least 2 needed" in str(error)
        assert f"waited for worker {key.public_hex[:16]}" in str(error)


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

    with pytest.raises(UserError, match=r"roles\.json: cannot be believed"), site.serving():
        pass


def test_who_knows_its_address_may_end_it_at_once(site: Site) -> None:
    assert hears_sigterm_at_once(site.server)
