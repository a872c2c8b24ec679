"""The real server over HTTP: a whole run, what ends it, what it refuses, what it gives to whom."""

from __future__ import annotations

import base64
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from runspec.core.canonical import canonical_json, digest_bytes
from runspec.core.errors import UserError
from runspec.core.files import write_atomic
from runspec.core.roles import sign_roles
from runspec.core.run_files import evaluation_file, submission_files
from runspec.core.signed import SigningKey, sign_document
from tests.ended_at_once import hears_sigterm_at_once
from tests.verify.coordinator.deployment import DEADLINE_S, RUN, Site, submission, tiny_spec
from tests.verify.coordinator.over_http import check, granted, post, request, sample, status
from verify.client import RunFinished, SubmissionRefused
from verify.coordinator_http import ENVELOPE, sign_request
from verify.formats.documents import Evaluated, Figure, ProblemResult, open_evaluation
from verify.formats.documents import sign_evaluation as sign
from verify.formats.lease import lease_digest
from verify.formats.submission import KIND, max_submission_bytes, open_submission, sign_submission
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
        assert batch.stats["graded_groups"] == batch.stats["leased_groups"] == 4
        assert batch.stats["task_reward_mean"] == 0.5 and batch.stats["reward_mean"] == 0.0
        for ask in (worker.lease, validator.next_submission):
            with pytest.raises(RunFinished):
                ask(DEADLINE_S)
        told = status(site)
        assert (told["state"], told["steps_closed"]) == ("finished", 3)
        assert told["workers"][0]["accepted_tokens"] == 3 * 8 * 5
        assert told["workers"][0]["state"]["tokens"] == 100
        metrics = request(site, "GET", "/metrics").text
        assert "runspec_coordinator_accepted_rollouts_total 24.0" in metrics


# -- What ends it --------------------------------------------------------------------------------


def test_roles_that_the_root_did_not_sign_stop_the_start(site: Site):
    path = site.run_dir / "keys" / "roles.json"
    roles = json.loads(path.read_bytes())
    roles["payload"]["roles"]["coordinator"] = [SigningKey.generate().public_hex]
    write_atomic(path, canonical_json(roles))
    with pytest.raises(UserError, match=r"roles\.json: cannot be verified"), site.serving():
        pass


def test_a_signal_ends_it_once_it_has_its_address(site: Site) -> None:
    assert hears_sigterm_at_once(site.server)


# -- What it refuses -----------------------------------------------------------------------------


def test_requests_are_refused_by_who_asks_and_a_key_that_was_refused_is_not_registered(site: Site):
    with site.serving():
        stranger, staff = site.client(SigningKey.generate()), site.client(site.validator)
        for ask, words in (
            (lambda: stranger.lease(0.0), "403, this key is not registered"),
            (lambda: stranger.heartbeat({}), "403, this key is neither"),
            (lambda: stranger.next_submission(0.0), "403, roles.json does not name this key"),
            (lambda: stranger.download("0" * 64), "403, roles.json does not name this key"),
            (lambda: stranger.register("none", {}), "404, the run has no pool 'none'"),
            (lambda: stranger.register("near", {"gpu": ["a", "b"]}), "400, info: "),
            (lambda: stranger.register("near", {"gpu": "x" * 1024}), "400, info: "),
            (lambda: staff.register("near", {}), "403, a key with a role"),
        ):
            with pytest.raises(UserError, match=words):
                ask()
        assert status(site)["workers"] == []
        stranger.register("near", {}), stranger.register("near", {})
        with pytest.raises(SubmissionRefused, match="409, this key is a worker of pool 'near'"):
            stranger.register("far", {})
        # and a client believes only the root that it pins
        for wrong, words in (
            ({"root": site.validator.public_hex}, "this run has a new root.*\n.*the current link"),
            ({"run": "other"}, "cannot be verified"),
        ):
            with pytest.raises(UserError, match=words):
                site.client(SigningKey.generate(), **wrong).spec()


def test_requests_are_refused_by_their_signature_size_and_form(site: Site):
    with site.serving():
        key, worker = site.worker()
        ask = {"wait": 0, "holding": []}
        unsigned = request(site, "POST", "/v1/leases", json=ask)
        assert unsigned.status_code == 401
        for wrong, code in (
            ({"x": "x" * 70_000} | ask, 413),
            *(({**ask, "wait": wait}, 400) for wait in ("1", -1, -(10**400), True)),
            *(({**ask, "holding": held}, 400) for held in (["../../etc"], ["0" * 64] * 65)),
            ({"wait": 0}, 400),
        ):
            assert post(site, key, "/v1/leases", canonical_json(wrong)).status_code == code, wrong
        many = post(site, key, "/v1/leases", canonical_json({"x\n" * 20_000: 0}))
        assert (many.status_code, len(many.json()["error"])) == (400, 500)  # not all comes back
        for state in ({"x": []}, {"x": "y" * 1024}, {"x": 10**999}):
            body = canonical_json({"state": state})
            assert post(site, key, "/v1/heartbeat", body).status_code == 400, state
        # and nobody gives another's lease back
        lease, _ = granted(site, worker)
        site.worker()[1]._post("/v1/release", {"leases": [lease_digest(lease)]})
        assert granted(site, site.client(key))[0] == lease


def test_malformed_submissions_leave_no_file_and_the_right_one_counts_once(site: Site):
    with site.serving():
        key, worker = site.worker()
        data, lease = granted(site, worker)
        envelope, table = submission(data, lease, key)
        assert granted(site, site.client(key))[0] == data  # a worker that starts again
        limit = max_submission_bytes(tiny_spec(), tiny_spec().samplers[0])
        large = bytes(limit + 1)

        def other(body: bytes = table, **changes: Any) -> bytes:
            named = {"step": lease.step, "index": 0, "lease": lease_digest(data), **changes}
            return sign_submission(body, run=RUN, key=key, **named)

        more = replace(open_submission(envelope), bytes=limit)  # room would be reserved for it
        for signed, body, code, words in (
            ("", table, 400, "is missing"),
            ("%%%", table, 400, "not base64"),
            (b"{}", table, 400, "fields"),
            (envelope.replace(b'"index":0', b'"index":7'), table, 400, "does not match"),
            (other(step=lease.step + 1), table, 400, "not the lease's"),
            (envelope, table + b"x", 400, "names another body"),
            (other(large), large, 413, "allowed"),
            (sign_document(KIND, asdict(more), key), table, 400, f"and {limit} were announced"),
            (other(lease="0" * 64), table, 409, "no such lease"),
        ):
            answer = post(site, key, "/v1/submissions", body, envelope=signed)
            assert (answer.status_code, words in answer.json()["error"]) == (code, True), words
        headers = sign_request(key, run=RUN, method="POST", path="/v1/submissions", body=table)
        headers[ENVELOPE] = base64.b64encode(envelope).decode()
        spoilt = {"content": table[:-1] + b"x", "headers": headers}
        answer = request(site, "POST", "/v1/submissions", **spoilt)
        assert (answer.status_code, answer.json()["error"][:17]) == (400, "the body's digest")
        assert list((site.run_dir / "rollouts").glob("*/*")) == []
        # the lease is still good, and the same bytes again change nothing
        worker.submit(envelope, table), worker.submit(envelope, table)
        with pytest.raises(SubmissionRefused, match="answered already, with other bytes"):
            worker.submit(*submission(data, lease, key, note=1))


# -- Files for volunteers ------------------------------------------------------------------------

ROWS = b'{"problem_id": "p"}\n' * 1000


def test_the_site_lists_the_files_of_the_data_and_nobody_gets_them_here(tmp_path: Path):
    path = tmp_path / "rows.parquet"
    path.write_bytes(ROWS)
    source = {"name": "s", "kind": "parquet", "uri": str(path)}
    site = Site(tmp_path, tiny_spec(data={"sources": [source]}))
    with site.origin(), site.serving():
        _, client = site.worker()
        (file,) = client.site().files
        assert (file.bytes, file.digest) == (len(ROWS), digest_bytes(ROWS))
        assert client.site().weights == [site.weights]
        for name in (file.digest, "../rows.parquet", "..%2Frows.parquet"):
            answer = request(site, "GET", f"/v1/data/{name}")
            assert answer.status_code == 404 and ROWS not in answer.content


# -- Results of evaluations ----------------------------------------------------------------------


RESULT = Evaluated(
    *(RUN, "held-out", 2, "a" * 64),
    figures={"mean": Figure(0.5, 0.2, 0.8), "pass-2": Figure(1.0, None, None)},
    faults=1,
    problems=[ProblemResult("p", 8, [1.0, 0.0, None], [4, 8, 9], 0.5)],
    finished=1.7e9,
    wall_s=3.5,
    cpu_s=2.5,
)


def test_only_the_evaluators_results_count_and_the_first_of_a_version_stays(tmp_path: Path):
    site = Site(tmp_path, tiny_spec(evaluations=[{"name": "held-out", "source": "s"}]))
    evaluator, stranger = SigningKey.generate(), SigningKey.generate()
    keys = {"publisher": site.publisher, "coordinator": site.coordinator}
    keys |= {"validator": site.validator, "evaluator": evaluator}
    named = {role: [key.public_hex] for role, key in keys.items()}
    document = sign_roles(RUN, named, site.root, valid_s=3600.0)
    write_atomic(site.run_dir / "keys" / "roles.json", document)
    with site.origin():
        with site.serving():
            client = site.client(evaluator)
            for sender, signer, changes, words in (
                (stranger, stranger, {}, "403"),
                (site.validator, site.validator, {}, "403"),
                (evaluator, stranger, {}, "400, .*may not sign it"),
                (evaluator, evaluator, {"run": "other"}, "400, .*another run or evaluation"),
                (evaluator, evaluator, {"evaluation": "x"}, "400, .*another run or evaluation"),
                (evaluator, evaluator, {"version": 4}, "400, .*version 4 of a run of 3 steps"),
                (evaluator, evaluator, {"evaluation": "../v1"}, "400, .*evaluation"),
                (evaluator, evaluator, {"faults": -1}, "400, .*faults"),
            ):
                with pytest.raises(UserError, match=words):
                    site.client(sender).evaluated(sign(replace(RESULT, **changes), signer))
            assert client.evaluations() == set() and not (site.run_dir / "evaluations").exists()
            client.evaluated(sign(RESULT, evaluator))
            client.evaluated(sign(replace(RESULT, faults=0), evaluator))
            stored = evaluation_file(site.run_dir, "held-out", 2).read_bytes()
            assert open_evaluation(stored, evaluators=frozenset({evaluator.public_hex})) == RESULT
            (row,) = request(site, "GET", "/v1/evaluations").json()["evaluations"]
            assert row["figures"] == {"mean": [0.5, 0.2, 0.8], "pass-2": [1.0, None, None]}
        with site.serving():  # and a new coordinator has it too
            assert site.client(evaluator).evaluations() == {("held-out", 2)}
