"""Limits over HTTP: whoever asks too often, by key or by address, keeps out only itself."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from runspec.core.canonical import canonical_json
from runspec.core.keys import SigningKey
from tests.verify.coordinator.deployment import DEADLINE_S, RUN, Site, tiny_spec
from tests.verify.coordinator.over_http import post
from tests.waiting import eventually
from verify.coordinator.edge.limits import AT_ONCE, RATES, Rate

BEAT = canonical_json({"state": {}})


@pytest.fixture
def proxied(tmp_path: Path) -> Iterator[Site]:
    """A run behind a proxy on this machine, which names the client."""
    spec = tiny_spec()
    verify = spec.verify.model_copy(update={"proxies": ["127.0.0.1"]})
    site = Site(tmp_path, spec.model_copy(update={"verify": verify}))
    site.publish(0)
    with site.origin():
        yield site


def test_a_key_with_a_role_is_under_no_rate(site: Site, monkeypatch):
    monkeypatch.setitem(RATES, ("key", "heartbeat"), Rate(0.5, 1))
    with site.serving():
        key, _ = site.worker()
        for who, codes in ((site.validator, [200] * 4), (key, [200, 429, 429, 429])):
            assert [post(site, who, "/v1/heartbeat", BEAT).status_code for _ in codes] == codes


@pytest.mark.parametrize(
    ("kind", "usual"), [("unbelieved", 401), ("public", 200), ("stranger", 403)]
)
def test_what_no_worker_signed_is_bounded_by_address(proxied: Site, monkeypatch, kind, usual):
    monkeypatch.setitem(RATES, ("address", kind), Rate(0.1, 2))
    ask = canonical_json({"wait": 0, "holding": []})

    def asked(address: str, key: SigningKey | None = None) -> httpx.Response:
        headers = {"X-Forwarded-For": address}
        if kind == "stranger":
            key = key or SigningKey.generate()
            return post(proxied, key, "/v1/leases", ask, headers=headers)
        path, method = ("/v1/leases", "POST") if kind == "unbelieved" else ("/v1/status", "GET")
        return httpx.request(method, proxied.url + path, headers=headers, trust_env=False)

    with proxied.serving():
        key, _ = proxied.worker()
        answers = [asked("203.0.113.9") for _ in range(3)]
        assert [answer.status_code for answer in answers] == [usual, usual, 429]
        assert 1 <= int(answers[-1].headers["Retry-After"]) <= 10
        assert asked("203.0.113.10").status_code == usual
        if kind == "stranger":
            assert asked("203.0.113.9", key).status_code == 200


def test_only_so_many_requests_of_a_key_wait_for_a_lease(site: Site, monkeypatch):
    monkeypatch.setitem(RATES, ("key", "lease"), Rate(1e6, 10**6))
    (site.store / RUN / "latest.json").unlink()  # nothing can be leased
    most = AT_ONCE["key", "poll"]
    with site.serving(), ThreadPoolExecutor(most) as pool:
        key, _ = site.worker()
        refused = []

        def ask(wait: float) -> httpx.Response:
            return post(site, key, "/v1/leases", canonical_json({"wait": wait, "holding": []}))

        def wait_for_a_lease() -> httpx.Response:
            while (answer := ask(30.0)).status_code == 429:
                """The one too many came first."""
            return answer

        def one_too_many() -> bool:
            refused.append(ask(0.0))
            return refused[-1].status_code == 429

        waiting = [pool.submit(wait_for_a_lease) for _ in range(most)]
        eventually(one_too_many, "as many requests are waiting as may")
        assert refused[-1].headers["Retry-After"] == "1"
        assert "are waiting for a lease already" in refused[-1].json()["error"]
        # when there is something to lease, then all of them are told, and there is room again
        site.publish(0)
        answers = [each.result(DEADLINE_S) for each in waiting]
        assert [answer.status_code for answer in answers] == [200] * most
        assert len({answer.content for answer in answers}) == 1
        assert ask(0.0).status_code == 200
