"""The real server over HTTP, real signatures, the real client."""

from __future__ import annotations

import base64
import json
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from runspec.common.canonical import canonical_json
from runspec.common.errors import UserError
from runspec.common.files import write_atomic
from runspec.common.hashing import digest_bytes
from runspec.common.keys import SigningKey
from runspec.common.process import RunStopped
from runspec.spec.resolved import dump_resolved
from tests.verify.coordinator.deployment import (
    DEADLINE_S,
    RUN,
    Site,
    submission,
    tiny_spec,
    verdict,
)
from tests.verify.coordinator.over_http import check, granted, post, sample
from tests.waiting import eventually
from verify.client import RunFinished, SubmissionRefused
from verify.formats.layout import submission_files
from verify.formats.lease import lease_digest
from verify.formats.submission import sign_submission
from verify.formats.verdict import decode_verdicts
from verify.limits import max_submission_bytes
from verify.request_auth import ENVELOPE, sign_request


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
        status = httpx.get(f"{site.url}/v1/status", trust_env=False).json()
        assert (status["state"], status["steps_closed"]) == ("finished", 3)
        assert status["workers"][0]["accepted_tokens"] == 3 * 8 * 5
        assert status["workers"][0]["state"]["tokens"] == 100
        metrics = httpx.get(f"{site.url}/metrics", trust_env=False).text
        assert "coordinator_accepted_rollouts_total 24.0" in metrics


def test_rejected_and_filtered_work_is_leased_again_and_counted(site: Site):
    with site.serving():
        key, worker = site.worker()
        validator = site.client(site.validator)
        for findings in ({"accepted": False}, {"task_rewards": (1.0, 1.0)}, {"dropped": (0,)}):
            sample(site, key, worker)
            check(site, validator, **findings)
        for _ in range(2):  # two groups, then the one that is left
            sample(site, key, worker)
            check(site, validator)

        batch = site.batch(0)

        assert batch.complete
        counted = {name: batch.stats[name] for name in batch.stats if name.endswith("groups")}
        assert counted == {
            "leased_groups": 9,
            "graded_groups": 6,
            "filtered_groups": 2,
            "dropped_groups": 1,
            "expired_groups": 0,
        }
        assert batch.stats["rejected_submissions"] == 1
        assert batch.stats["rejected_rollouts"] == 4
        assert batch.stats["accepted_rollouts"] == 12
        status = httpx.get(f"{site.url}/v1/status", trust_env=False).json()
        assert status["recent_rejections"][0]["reason"] == "logprobs: row 0: 0.25 > 0.1"


def test_a_worker_that_waits_is_answered_when_a_version_is_published(site: Site):
    (site.store / RUN / "latest.json").unlink()
    with site.serving():
        _, worker = site.worker()
        assert worker.lease(0.0) is None

        site.publish(0)

        assert granted(site, worker)[1].version == 0


def test_a_restarted_worker_gets_its_lease_again_and_its_answer_counts_once(site: Site):
    with site.serving():
        key, worker = site.worker()
        data, lease = granted(site, worker)

        again, _ = granted(site, site.client(key))
        assert again == data

        envelope, table = submission(data, lease, key)
        worker.submit(envelope, table)
        worker.submit(envelope, table)  # the answer to the first was lost, say
        other = submission(data, lease, key, note=1)
        with pytest.raises(SubmissionRefused, match="answered already, with other bytes"):
            worker.submit(*other)


def test_a_submission_must_be_the_lease_holders_own(site: Site):
    with site.serving():
        key, worker = site.worker()
        thief_key, thief = site.worker()
        data, lease = granted(site, worker)
        envelope, table = submission(data, lease, key)

        with pytest.raises(UserError, match="403, the lease is another worker's"):
            thief.submit(*submission(data, lease, thief_key))
        with pytest.raises(UserError, match="403, the submission is another worker's"):
            thief.submit(envelope, table)

        worker.submit(envelope, table)
        stolen_data, stolen_lease = granted(site, thief)
        theft = sign_submission(
            table,
            run=RUN,
            step=stolen_lease.step,
            index=stolen_lease.index,
            lease=lease_digest(stolen_data),
            key=thief_key,
        )
        with pytest.raises(SubmissionRefused, match="same bytes were submitted for another lease"):
            thief.submit(theft, table)


def test_an_expired_lease_is_refused_and_a_new_one_granted(tmp_path: Path):
    site = Site(tmp_path, tiny_spec(lease_timeout="50ms"))
    site.publish(0)
    with site.origin(), site.serving():
        key, worker = site.worker()
        data, lease = granted(site, worker)
        status = lambda: httpx.get(f"{site.url}/v1/status", trust_env=False).json()  # noqa: E731
        # on a slow machine an earlier one may have expired before it was answered with
        withheld = lambda: status()["workers"][0]["withheld_leases"]  # noqa: E731
        eventually(lambda: withheld() > lease.index, "the lease expires")

        with pytest.raises(SubmissionRefused, match="the lease has expired"):
            worker.submit(*submission(data, lease, key))

        assert granted(site, worker)[1].index > lease.index


def test_malformed_submissions_are_refused_and_leave_no_file(site: Site):
    with site.serving():
        key, worker = site.worker()
        data, lease = granted(site, worker)
        envelope, table = submission(data, lease, key)
        wrong_step = sign_submission(
            table, run=RUN, step=lease.step + 1, index=0, lease=lease_digest(data), key=key
        )
        forged = envelope.replace(f'"index":{lease.index}'.encode(), b'"index":7')
        limit = max_submission_bytes(tiny_spec(), tiny_spec().samplers[0])
        large = bytes(limit + 1)
        too_large = sign_submission(
            large, run=RUN, step=0, index=0, lease=lease_digest(data), key=key
        )
        unknown = sign_submission(table, run=RUN, step=0, index=0, lease="0" * 64, key=key)

        for signed, body, status, words in (
            ("", table, 400, "is missing"),
            ("%%%", table, 400, "not base64"),
            (b"{}", table, 400, "fields"),
            (forged, table, 400, "signature does not match"),
            (wrong_step, table, 400, "not the lease's"),
            (envelope, table + b"x", 400, "names another body"),
            (too_large, large, 413, "allowed"),
            (unknown, table, 409, "no such lease"),
        ):
            answer = post(site, key, "/v1/submissions", body, envelope=signed)
            assert (answer.status_code, words in answer.json()["error"]) == (status, True), words

        assert list((site.run_dir / "rollouts").glob("*/*")) == []
        worker.submit(envelope, table)  # the lease is still good


def test_a_body_other_than_the_signed_one_is_refused(site: Site):
    with site.serving():
        key, worker = site.worker()
        data, lease = granted(site, worker)
        envelope, table = submission(data, lease, key)
        headers = sign_request(key, run=RUN, method="POST", path="/v1/submissions", body=table)
        headers[ENVELOPE] = base64.b64encode(envelope).decode()

        answer = httpx.post(
            f"{site.url}/v1/submissions",
            content=table[:-1] + b"x",
            headers=headers,
            trust_env=False,
        )

        assert answer.status_code == 400
        assert "the body's digest is" in answer.json()["error"]


def test_requests_are_refused_by_who_asks(site: Site):
    with site.serving():
        stranger = SigningKey.generate()
        client = site.client(stranger)
        with pytest.raises(UserError, match="403, this key is not registered"):
            client.lease(0.0)
        with pytest.raises(UserError, match="403, this key is neither"):
            client.heartbeat({})
        with pytest.raises(UserError, match=r"403, roles\.json does not name this key"):
            client.next_submission(0.0)
        with pytest.raises(UserError, match=r"403, roles\.json does not name this key"):
            client.download("0" * 64)
        with pytest.raises(UserError, match="404, the run has no pool 'none'; it has near, far"):
            client.register("none", {})
        with pytest.raises(UserError, match="403, a key with a role"):
            site.client(site.validator).register("near", {})
        client.register("near", {})
        client.register("near", {})
        with pytest.raises(SubmissionRefused, match="409, this key is a worker of pool 'near'"):
            client.register("far", {})


def test_a_worker_whose_words_are_refused_is_not_registered(site: Site):
    with site.serving():
        client = site.client(SigningKey.generate())
        for info in ({"gpu": ["a", "b"]}, {"gpu": "x" * 121}, {str(i): i for i in range(17)}):
            with pytest.raises(UserError, match="400, info: "):
                client.register("near", info)
        with pytest.raises(UserError, match="403, this key is not registered"):
            client.lease(0.0)
        assert httpx.get(f"{site.url}/v1/status", trust_env=False).json()["workers"] == []


def test_requests_are_refused_by_their_signature_and_size(site: Site):
    with site.serving():
        key, _ = site.worker()
        body = canonical_json({"wait": 0, "holding": []})
        headers = sign_request(key, run=RUN, method="POST", path="/v1/leases", body=body)
        ask = lambda **change: httpx.post(  # noqa: E731
            f"{site.url}/v1/leases",
            content=change.pop("content", body),
            headers={**headers, **change.pop("headers", {})},
            trust_env=False,
        )

        assert ask().status_code == 200
        assert "made before" in ask().json()["error"]  # a replay
        assert httpx.post(f"{site.url}/v1/leases", content=body, trust_env=False).status_code == 401
        other = sign_request(key, run="other", method="POST", path="/v1/leases", body=body)
        assert ask(headers=other).status_code == 401
        fresh = sign_request(key, run=RUN, method="POST", path="/v1/leases", body=body)
        assert ask(headers=fresh, content=body + b" ").status_code == 401
        large = canonical_json({"wait": 0, "holding": [], "x": "x" * 70_000})
        assert post(site, key, "/v1/leases", large).status_code == 413
        for wrong in (
            {"wait": "1", "holding": []},
            {"wait": -1, "holding": []},
            {"wait": -(10**400), "holding": []},
            {"wait": 0, "holding": ["../../etc"]},
            {"wait": 0, "holding": ["0" * 64] * 65},
            {"wait": 0},
            {"wait": True, "holding": []},
        ):
            assert post(site, key, "/v1/leases", canonical_json(wrong)).status_code == 400, wrong
        assert post(site, key, "/v1/leases", b"[" * 100).status_code == 400
        many = post(site, key, "/v1/leases", canonical_json({"x\n" * 20_000: 0}))
        assert (many.status_code, len(many.json()["error"])) == (400, 500)  # not all comes back
        for state in ({"x": []}, {"x": "y" * 200}, {str(i): i for i in range(20)}, {"x": 10**999}):
            body = canonical_json({"state": state})
            assert post(site, key, "/v1/heartbeat", body).status_code == 400, state


def test_a_validator_that_dies_loses_no_submission(site: Site):
    with site.serving():
        key, worker = site.worker()
        digest, _ = sample(site, key, worker)
        first = site.client(site.validator)
        assert first.next_submission(DEADLINE_S).submission == digest
        assert first.next_submission(0.0) is None  # it is held

        second = site.client(site.validator)  # the same key, a new process that holds nothing

        assert check(site, second) == digest


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
        status = httpx.get(f"{site.url}/v1/status", trust_env=False).json()
        assert status["rejected_submissions"] == 0
        assert status["workers"][0]["accepted_rollouts"] == 4


def test_verdicts_that_do_not_fit_are_refused(site: Site):
    with site.serving():
        key, worker = site.worker()
        digest, lease = sample(site, key, worker)
        validator = site.client(site.validator)
        envelope, table = verdict(digest, lease, site.validator)
        _, half = verdict(digest, replace(lease, groups=1), site.validator)
        other_step = replace(lease, step=1)
        nan = verdict(digest, lease, site.validator, task_rewards=(float("nan"), 1.0))

        for signed, body, words in (
            (*verdict(digest, lease, key), "may not sign it"),
            (envelope, half, "names another body"),
            (*verdict(digest, other_step, site.validator), "not the submission's"),
            (*verdict(digest, lease, site.validator, dropped=(2,)), "dropped_groups"),
            (*nan, "finite"),
        ):
            answer = post(site, site.validator, "/v1/verdicts", body, envelope=signed)
            assert (answer.status_code, words in answer.json()["error"]) == (400, True), words

        validator.verdict(envelope, table)
        assert validator.next_submission(0.0) is None


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


def test_the_client_believes_only_the_root_that_it_pins(site: Site):
    with site.serving():
        key = SigningKey.generate()
        wrong = site.client(key, root=key.public_hex)
        with pytest.raises(UserError, match="not to be believed"):
            wrong.spec()
        elsewhere = site.client(key, run="other")
        with pytest.raises(UserError, match="not to be believed"):
            elsewhere.spec()


def test_the_client_names_a_coordinator_that_cannot_be_reached(site: Site, free_port: int):
    site.url = f"http://127.0.0.1:{free_port}"
    client = site.client(SigningKey.generate(), deadline_s=0.1)

    with pytest.raises(UserError, match=f"coordinator http://127.0.0.1:{free_port}: cannot be"):
        client.spec()


def test_the_spec_must_fit_the_keys(site: Site):
    write_atomic(site.run_dir / "spec.json", dump_resolved(tiny_spec(steps=5)))
    roles = json.loads((site.run_dir / "keys" / "roles.json").read_bytes())
    roles["payload"]["roles"]["coordinator"] = [SigningKey.generate().public_hex]
    write_atomic(site.run_dir / "keys" / "roles.json", canonical_json(roles))

    with pytest.raises(UserError, match=r"roles\.json: cannot be believed"), site.serving():
        pass
