"""Who asks too often or with too much, of the real server over real sockets."""

from __future__ import annotations

import base64
import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from runspec.core.canonical import canonical_json
from runspec.core.keys import SigningKey
from runspec.core.spec.role_names import worker_names
from tests.attacks.impatient import (
    connected,
    head,
    impatient_site,
    received,
    stored,
)
from tests.verify.coordinator.deployment import DEADLINE_S, RUN, Site, submission, tiny_spec
from tests.verify.coordinator.over_http import granted
from tests.verify.coordinator.over_http import post as requested
from tests.waiting import eventually
from verify.coordinator import server
from verify.coordinator.edge import limits
from verify.coordinator.ledger.ledger import Ledger
from verify.coordinator.services.status import Cache
from verify.request_auth import ENVELOPE, sign_request

ASK = canonical_json({"wait": 0, "holding": []})


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    with impatient_site(tmp_path, monkeypatch) as site:
        yield site


Post = Callable[..., httpx.Response]


@pytest.fixture
def post(site: Site) -> Iterator[Post]:
    """Sends a signed request: key, path, body, further headers by name."""
    each_anew = httpx.Limits(max_keepalive_connections=0)
    with httpx.Client(base_url=site.url, verify=False, limits=each_anew) as http:

        def send(key: SigningKey, path: str, body: bytes, **headers: str) -> httpx.Response:
            signed = sign_request(key, run=RUN, method="POST", path=path, body=body)
            return http.post(path, content=body, headers=signed | headers)

        yield send


class TestFlooding:
    """Requests, keys, leases, submissions and connections without end: 429 and a time to come
    again, and a disk that stays as it is."""

    def test_requests_of_a_worker(
        self, site: Site, post: Post, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(limits.RATES, ("key", "lease"), limits.Rate(0.5, 20))
        (key, _), (other, _) = site.worker(), site.worker()
        answers = [post(key, "/v1/leases", ASK) for _ in range(40)]
        refused = [a for a in answers if a.status_code == 429]
        assert len(refused) >= 15
        assert all(1 <= int(a.headers["Retry-After"]) <= 3 for a in refused)
        assert post(other, "/v1/leases", ASK).status_code == 200  # others are served

    def test_new_keys(self, site: Site, post: Post) -> None:
        """A thousand rows of the ledger would be a small thing; a million would not."""
        (key, _), body = site.worker(), canonical_json({"pool": "near", "info": {}})
        answers = [post(SigningKey.generate(), "/v1/workers", body) for _ in range(100)]
        codes = [a.status_code for a in answers]
        assert set(codes) == {200, 429} and codes.count(200) < 80
        assert int(answers[-1].headers["Retry-After"]) >= 1
        assert post(key, "/v1/heartbeat", canonical_json({"state": {}})).status_code == 200

    def test_new_keys_that_wait_for_a_lease(
        self, site: Site, post: Post, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Each event wakes all who wait: of keys without accepted work not thousands may."""
        monkeypatch.setitem(limits.AT_ONCE, ("all", "newcomer poll"), 2)
        holders = [site.worker(invited=False) for _ in range(2)]
        while any(client.lease(0.0) for _, client in holders):
            pass  # nothing is left to lease to new keys
        waiting = [site.worker(invited=False)[0] for _ in range(2)]
        long = canonical_json({"wait": 2, "holding": []})
        with ThreadPoolExecutor(2) as threads:
            asked = [threads.submit(post, key, "/v1/leases", long) for key in waiting]
            late, refused = site.worker(invited=False)[0], []

            def one_too_many() -> bool:
                refused.append(post(late, "/v1/leases", ASK))
                return refused[-1].status_code == 429

            eventually(one_too_many, "as many are waiting as may")
            assert refused[-1].headers["Retry-After"] == "5"
            assert [each.result(DEADLINE_S).status_code for each in asked] == [204, 204]
        assert post(late, "/v1/leases", ASK).status_code == 204

    def test_new_keys_that_wait_do_not_keep_the_runs_own_from_its_first_lease(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """At a run's start nobody has accepted work: then a few strangers' keys were all who may
        ask."""
        monkeypatch.setitem(limits.AT_ONCE, ("all", "newcomer poll"), 0)
        site, own = Site(tmp_path, tiny_spec()), SigningKey.generate()
        site.own_worker(next(iter(worker_names(tiny_spec()))), own)
        site.publish(0)
        with site.origin(), site.serving():
            (stranger, _), worker = site.worker(invited=False), site.client(own)
            worker.register("near", {})
            assert requested(site, stranger, "/v1/leases", ASK).status_code == 429
            assert granted(site, worker)[1].index == 0

    def test_leases_given_back_again_and_again(self, site: Site) -> None:
        """Each return and each grant is a row of the ledger. What new keys gave back takes up their
        share of the step until it ends, so soon there is nothing to give back."""
        _, worker = site.worker(invited=False)
        for _ in range(8):
            worker.lease(0.0)
            worker.release()
        written = [type(event).__name__ for event in ledger_rows(site)]
        assert written.count("LeaseReleased") == written.count("LeaseGranted") == 2

    def test_a_body_larger_than_announced_or_allowed(self, site: Site) -> None:
        key, client = site.worker()
        data, lease = granted(site, client)
        envelope, table = submission(data, lease, key)
        raw = base64.b64encode(envelope).decode()
        signed = sign_request(key, run=RUN, method="POST", path="/v1/submissions", body=table)

        def endless() -> Iterator[bytes]:
            yield table
            for _ in range(1000):
                yield bytes(1 << 16)

        answer = httpx.post(
            f"{site.url}/v1/submissions", content=endless(), headers=signed | {ENVELOPE: raw}
        )
        assert answer.status_code == 413
        assert stored(site) == []
        client.submit(envelope, table)  # the lease is still good

    def test_a_large_status_is_sent_to_few_at_once(
        self, site: Site, post: Post, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(server, "_SMALL_BYTES", 100)
        key, _ = site.worker()
        ask = lambda: httpx.get(f"{site.url}/v1/status", verify=False)  # noqa: E731
        assert [each["key"] for each in ask().json()["workers"]] == [key.public_hex]
        monkeypatch.setitem(limits.AT_ONCE, ("all", "download"), 0)
        assert (ask().status_code, ask().headers["Retry-After"]) == (503, "5")
        assert post(key, "/v1/leases", ASK).status_code == 200

    def test_downloads_that_are_not_taken(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """They are being answered, and so make no room: there are few of them."""
        monkeypatch.setitem(limits.AT_ONCE, ("address", "download"), 2)
        file = tmp_path / "rows.parquet"
        file.write_bytes(bytes(32 << 20))
        spec = tiny_spec()
        source = spec.data.sources[0].model_copy(update={"uri": str(file)})
        data = spec.data.model_copy(update={"sources": [source]})
        site = Site(tmp_path, spec.model_copy(update={"data": data}))
        with site.origin(), site.serving(), httpx.Client(base_url=site.url, verify=False) as http:
            digest = site.worker()[1].site().files[0].digest
            asked = f"GET /v1/data/{digest} HTTP/1.1\r\nHost: x\r\n\r\n".encode()
            with ExitStack() as held:
                for _ in range(2):
                    stream = held.enter_context(connected(site))
                    stream.sendall(asked)
                    assert received(stream)
                refused = http.get(f"/v1/data/{digest}")
                assert (refused.status_code, refused.headers["Retry-After"]) == (503, "5")
                assert http.get("/healthz").status_code == 200
            eventually(lambda: http.get(f"/v1/data/{digest}").status_code == 200, "they have gone")

    def test_lines_in_the_log(
        self, site: Site, post: Post, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Each refusal would be a line, each malformed request a traceback: none is."""
        caplog.set_level("INFO")
        key, _ = site.worker()
        answers = {post(SigningKey.generate(), "/v1/leases", ASK).status_code for _ in range(60)}
        assert answers <= {403, 429}
        # and requests that are none are answered too
        chunks = head(site, key, "/v1/leases", ASK).replace(
            f"Content-Length: {len(ASK)}".encode(), b"Transfer-Encoding: chunked"
        )
        for broken in (b"GARBAGE\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", chunks + b"no length\r\n"):
            with connected(site) as stream:
                stream.sendall(broken)
                assert b" 400 " in stream.recv(4096)
        logged = {"verify.coordinator.server", "aiohttp.server"}
        assert [r.getMessage() for r in caplog.records if r.name in logged] == []

    def test_a_status_that_takes_long_to_make(self) -> None:
        """Of thousands of keys it takes a second, and anybody may ask: it is made for many."""
        clock, made = [0.0], []

        def make() -> int:
            clock[0] += 0.5
            made.append(clock[0])
            return len(made)

        cache = Cache(make, lambda: clock[0])
        while clock[0] < 100.0:
            assert cache.get() == len(made)
            clock[0] += 0.02
        # then a twentieth of the time went into it, and nobody saw one older than that asks for
        assert len(made) * 0.5 <= 0.06 * clock[0]
        assert all(b - a < 11.0 for a, b in itertools.pairwise(made))

    def test_connections(self, site: Site, post: Post) -> None:
        """Three times as many as there may be: the idle make room for those who work."""
        key, worker = site.worker()
        with ExitStack() as held:
            idle = [held.enter_context(connected(site)) for _ in range(72)]
            for _ in range(3):
                worker.heartbeat({"version": 0})
                assert post(key, "/v1/leases", ASK).status_code == 200
            ended = 0
            for stream in idle:
                stream.settimeout(DEADLINE_S)
                ended += not received(stream)
        assert ended == len(idle)  # room made at once, the others after IDLE_S


def ledger_rows(site: Site) -> list[object]:
    ledger = Ledger(site.run_dir / "state.db")
    try:
        return list(ledger.events())
    finally:
        ledger.close()
