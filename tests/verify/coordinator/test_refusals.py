"""Requests that the server refuses, and servers that the client does not believe."""

from __future__ import annotations

import httpx
import pytest

from runspec.core.canonical import canonical_json
from runspec.core.errors import UserError
from runspec.core.keys import SigningKey
from tests.verify.coordinator.deployment import RUN, Site
from tests.verify.coordinator.over_http import post, status
from verify.client import SubmissionRefused
from verify.request_auth import sign_request


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
        for state in ({"x": []}, {"x": "y" * 200}, {str(i): i for i in range(20)}, {"x": 10**999}):
            body = canonical_json({"state": state})
            assert post(site, key, "/v1/heartbeat", body).status_code == 400, state


def test_the_client_believes_only_the_root_that_it_pins(site: Site):
    with site.serving():
        key = SigningKey.generate()
        for wrong in (site.client(key, root=key.public_hex), site.client(key, run="other")):
            with pytest.raises(UserError, match="not to be believed"):
                wrong.spec()
