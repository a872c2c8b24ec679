"""Who asks too often, by key and by address, keeps out only itself."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import httpx
import pytest

from runspec.core.canonical import canonical_json
from runspec.core.keys import SigningKey
from tests.verify.coordinator.deployment import (
    DEADLINE_S,
    Site,
    submission,
    tiny_spec,
)
from tests.verify.coordinator.over_http import granted, post
from tests.waiting import eventually
from verify.coordinator import rates
from verify.coordinator.filling import MAX_OPEN_LEASES
from verify.coordinator.rates import MAX_POLLS
from verify.formats.lease import lease_digest
from verify.request_auth import RequestChecker


def test_a_key_that_asks_too_often_is_told_when_to_come_again(site: Site, monkeypatch):
    monkeypatch.setitem(rates.WORKER_RATES, "heartbeat", rates.Rate(0.5, 3))
    beat = canonical_json({"state": {}})
    with site.serving():
        (key, _), (other, _) = site.worker(), site.worker()

        answers = [post(site, key, "/v1/heartbeat", beat) for _ in range(4)]

        assert [answer.status_code for answer in answers] == [200, 200, 200, 429]
        assert answers[-1].headers["Retry-After"] in ("1", "2")
        assert "too many requests (heartbeat): come again in" in answers[-1].json()["error"]
        assert post(site, other, "/v1/heartbeat", beat).status_code == 200
        lease = canonical_json({"wait": 0, "holding": []})
        assert post(site, key, "/v1/leases", lease).status_code == 200
        for _ in range(20):  # who has a role is not counted
            assert post(site, site.validator, "/v1/heartbeat", beat).status_code == 200


def test_a_key_that_fills_the_memory_of_replays_keeps_only_itself_out(site: Site, monkeypatch):
    small = partial(RequestChecker, max_of_a_key=4)
    monkeypatch.setattr("verify.coordinator.run.RequestChecker", small)
    beat = canonical_json({"state": {}})
    with site.serving():
        (key, _), (other, _) = site.worker(), site.worker()

        answers = [post(site, key, "/v1/heartbeat", beat) for _ in range(4)]

        assert [answer.status_code for answer in answers] == [200, 200, 200, 429]
        assert 200 < int(answers[-1].headers["Retry-After"]) <= 300
        assert post(site, other, "/v1/heartbeat", beat).status_code == 200


def from_place(address: str) -> dict[str, str]:
    """What the proxy of `proxied` says of a caller."""
    return {"X-Forwarded-For": address}


@pytest.fixture
def proxied(tmp_path: Path) -> Iterator[Site]:
    """A run behind a proxy on this machine, which says who asks."""
    spec = tiny_spec()
    verify = spec.verify.model_copy(update={"proxies": ["127.0.0.1"]})
    site = Site(tmp_path, spec.model_copy(update={"verify": verify}))
    site.publish(0)
    with site.origin():
        yield site


def test_a_flood_of_new_keys_keeps_only_its_own_address_out(proxied: Site, monkeypatch):
    monkeypatch.setitem(rates.PER_PLACE, "registration", rates.Rate(0.01, 2))
    body = canonical_json({"pool": "near", "info": {}})

    def register(key: SigningKey, place: str) -> int:
        headers = from_place(place)
        return post(proxied, key, "/v1/workers", body, headers=headers).status_code

    with proxied.serving():
        keys = [SigningKey.generate() for _ in range(4)]
        # given a flood from one address, whatever else it says of itself
        assert [register(key, "203.0.113.9") for key in keys[:2]] == [200, 200]
        assert register(keys[2], "203.0.113.9") == 429
        assert register(keys[2], "198.51.100.1, 203.0.113.9") == 429
        # then others may register, and who is registered there may still work
        assert register(keys[2], "2001:db8::1") == 200
        assert register(keys[0], "203.0.113.9") == 200
        lease = canonical_json({"wait": 0, "holding": []})
        answer = post(proxied, keys[0], "/v1/leases", lease, headers=from_place("203.0.113.9"))
        assert answer.status_code == 200
        # and a /64 is one place
        assert register(keys[3], "2001:db8::ffff") == 200
        assert register(SigningKey.generate(), "2001:db8::2") == 429


def test_a_forwarded_header_is_nothing_where_no_proxy_is_listed(site: Site, monkeypatch):
    monkeypatch.setitem(rates.PER_PLACE, "registration", rates.Rate(0.01, 2))
    body = canonical_json({"pool": "near", "info": {}})
    with site.serving():
        codes = [
            post(
                *(site, SigningKey.generate(), "/v1/workers", body),
                headers=from_place(f"203.0.113.{n}"),
            ).status_code
            for n in range(3)
        ]
        assert codes == [200, 200, 429]
        assert len(httpx.get(f"{site.url}/v1/status", trust_env=False).json()["workers"]) == 2


def test_new_keys_of_all_addresses_together_have_a_bound_above(proxied: Site, monkeypatch):
    monkeypatch.setitem(rates.TOGETHER, "registration", rates.Rate(0.01, 2))
    body = canonical_json({"pool": "near", "info": {}})
    with proxied.serving():
        answers = [
            post(
                *(proxied, SigningKey.generate(), "/v1/workers", body),
                headers=from_place(f"203.0.113.{n}"),
            )
            for n in range(3)
        ]
        assert [answer.status_code for answer in answers] == [200, 200, 429]
        assert 1 <= int(answers[-1].headers["Retry-After"]) <= 100


def test_strangers_of_one_address_do_not_use_up_what_others_and_the_workers_have(
    proxied: Site, monkeypatch
):
    monkeypatch.setitem(rates.PER_PLACE, "stranger", rates.Rate(0.1, 2))
    ask = canonical_json({"wait": 0, "holding": []})

    def asked(key: SigningKey, place: str) -> int:
        return post(proxied, key, "/v1/leases", ask, headers=from_place(place)).status_code

    with proxied.serving():
        key, _ = proxied.worker()
        codes = [asked(SigningKey.generate(), "203.0.113.9") for _ in range(3)]
        assert codes == [403, 403, 429]
        assert asked(SigningKey.generate(), "203.0.113.10") == 403
        assert asked(key, "203.0.113.9") == 200


@pytest.mark.parametrize("kind", ["unbelieved", "public"])
def test_what_nobody_signed_is_bounded_by_address_too(proxied: Site, monkeypatch, kind: str):
    monkeypatch.setitem(rates.PER_PLACE, kind, rates.Rate(0.1, 2))

    def ask(place: str) -> httpx.Response:
        path, method = ("/v1/leases", "POST") if kind == "unbelieved" else ("/v1/status", "GET")
        headers = from_place(place)
        return httpx.request(method, proxied.url + path, headers=headers, trust_env=False)

    with proxied.serving():
        usual = 401 if kind == "unbelieved" else 200
        answers = [ask("203.0.113.9") for _ in range(3)]
        assert [answer.status_code for answer in answers] == [usual, usual, 429]
        assert 1 <= int(answers[-1].headers["Retry-After"]) <= 10
        assert "from your address" in answers[-1].json()["error"]
        assert ask("203.0.113.10").status_code == usual


def test_only_so_many_requests_of_a_key_wait_for_a_lease(site: Site, monkeypatch):
    monkeypatch.setitem(rates.WORKER_RATES, "lease", rates.Rate(1e6, 10**6))
    with site.serving(), ThreadPoolExecutor(MAX_POLLS) as pool:
        key, worker = site.worker()
        leases = [granted(site, worker) for _ in range(MAX_OPEN_LEASES)]
        held = [lease_digest(data) for data, _ in leases]

        def ask(wait: float) -> httpx.Response:
            return post(site, key, "/v1/leases", canonical_json({"wait": wait, "holding": held}))

        def wait_for_a_lease() -> httpx.Response:
            while (answer := ask(30.0)).status_code == 429:
                """The one too many came first."""
            return answer

        # given as many requests as may wait, and none that can be answered
        waiting = [pool.submit(wait_for_a_lease) for _ in range(MAX_POLLS)]
        refused = []

        def one_too_many() -> bool:
            refused.append(ask(0.0))
            return refused[-1].status_code == 429

        eventually(one_too_many, "as many requests are waiting as may")
        assert refused[-1].headers["Retry-After"] == "1"
        assert "are waiting for a lease already" in refused[-1].json()["error"]
        # when there is something to lease, then all of them are told, and there is room again
        data, lease = leases[0]
        worker.submit(*submission(data, lease, key))
        answers = [each.result(DEADLINE_S) for each in waiting]
        assert [answer.status_code for answer in answers] == [200] * MAX_POLLS
        assert len({answer.content for answer in answers}) == 1
        assert ask(0.0).status_code == 200
