"""Requests and submissions that the server refuses, by who asks and by what was sent."""

from __future__ import annotations

import base64
from dataclasses import asdict, replace

import httpx
import pytest

from runspec.core.canonical import canonical_json
from runspec.core.errors import UserError
from runspec.core.keys import SigningKey
from runspec.core.signed import sign_document
from tests.verify.coordinator.deployment import RUN, Site, submission, tiny_spec
from tests.verify.coordinator.over_http import granted, post, status
from verify.client import SubmissionRefused
from verify.formats.lease import lease_digest
from verify.formats.submission import KIND, max_submission_bytes, open_submission, sign_submission
from verify.request_auth import ENVELOPE, sign_request


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
        for info in ({"gpu": ["a", "b"]}, {"gpu": "x" * 1024}):
            with pytest.raises(UserError, match="400, info: "):
                client.register("near", info)
        with pytest.raises(UserError, match="403, this key is not registered"):
            client.lease(0.0)
        assert status(site)["workers"] == []


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
        for state in ({"x": []}, {"x": "y" * 1024}, {"x": 10**999}):
            body = canonical_json({"state": state})
            assert post(site, key, "/v1/heartbeat", body).status_code == 400, state


def test_the_client_believes_only_the_root_that_it_pins(site: Site):
    with site.serving():
        key = SigningKey.generate()
        for wrong in (site.client(key, root=key.public_hex), site.client(key, run="other")):
            with pytest.raises(UserError, match="cannot be verified"):
                wrong.spec()


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
        more = replace(open_submission(envelope), bytes=limit)  # room would be kept for it
        less_than_announced = sign_document(KIND, asdict(more), key)

        for signed, body, status, words in (
            ("", table, 400, "is missing"),
            ("%%%", table, 400, "not base64"),
            (b"{}", table, 400, "fields"),
            (forged, table, 400, "signature does not match"),
            (wrong_step, table, 400, "not the lease's"),
            (envelope, table + b"x", 400, "names another body"),
            (too_large, large, 413, "allowed"),
            (less_than_announced, table, 400, f"and {limit} were announced"),
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
