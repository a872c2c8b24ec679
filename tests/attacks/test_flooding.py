"""Who asks too often, too slowly or with too much, of the real server over real sockets."""

from __future__ import annotations

import asyncio
import base64
import itertools
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
from aiohttp import web

from runspec.common.canonical import canonical_json
from runspec.common.keys import SigningKey
from runspec.spec.schema import Backlog
from tests.verify.coordinator.deployment import DEADLINE_S, RUN, Site, submission, tiny_spec
from tests.waiting import eventually
from verify.client import CoordinatorClient
from verify.coordinator import connections, intake, log_limits, rates, server
from verify.coordinator.kept import Kept
from verify.formats.lease import Lease, open_lease
from verify.ledger import Ledger
from verify.request_auth import ENVELOPE, sign_request

ASK = canonical_json({"wait": 0, "holding": []})
WAITING, LINES = 2, 20
"""Submissions that may wait for a verdict; lines of refusals that the log takes at once."""


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """A coordinator at work, of little patience and room."""
    monkeypatch.setattr(connections, "IDLE_S", 1.0)
    monkeypatch.setattr(connections, "LINGER_S", 0.2)
    monkeypatch.setattr(connections, "MAX_CONNECTIONS", 24)
    monkeypatch.setattr(log_limits, "LINES", rates.Rate(0.1, LINES))
    monkeypatch.setattr(server, "BODY_S", 1.5)
    monkeypatch.setattr(intake, "UPLOAD_TIMEOUT_S", 1.5)
    spec = tiny_spec()
    backlog = Backlog.model_validate({"submissions": WAITING})
    verify = spec.verify.model_copy(update={"backlog": backlog})
    site = Site(tmp_path, spec.model_copy(update={"verify": verify}))
    site.publish(0)
    with site.origin(), site.serving():
        yield site


def granted(site: Site, client: CoordinatorClient) -> tuple[bytes, Lease]:
    data = client.lease(DEADLINE_S)
    assert data is not None
    return data, open_lease(data, coordinators=frozenset({site.coordinator.public_hex}))


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


def head(site: Site, key: SigningKey, path: str, body: bytes, envelope: bytes = b"") -> bytes:
    """The head of a signed request that announces this body."""
    headers = sign_request(key, run=RUN, method="POST", path=path, body=body)
    headers |= {"Host": "coordinator", "Content-Length": str(len(body))}
    headers |= {ENVELOPE: base64.b64encode(envelope).decode()} if envelope else {}
    lines = [f"POST {path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


def connected(site: Site) -> socket.socket:
    host, port = site.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=DEADLINE_S)


def dripped(site: Site, at_once: bytes, drops: bytes, every_s: float = 0.02) -> bytes:
    """Sends some bytes at once and others one by one, until the server ends the connection; what
    it answered. Fails where it never does."""
    answer, ends = b"", time.monotonic() + DEADLINE_S
    with connected(site) as stream:
        stream.sendall(at_once)
        stream.settimeout(every_s)
        for drop in drops:
            assert time.monotonic() < ends, "the server waits on"
            try:
                stream.sendall(bytes([drop]))
                piece = stream.recv(4096)
                if not piece:
                    return answer
                answer += piece
            except TimeoutError:
                continue
            except ConnectionError:
                return answer
    pytest.fail("the server took all of it")


def stored(site: Site) -> list[Path]:
    return [p for p in site.run_dir.glob("rollouts/**/*") if p.is_file()]


class TestFlooding:
    """Requests, keys, leases, submissions and connections without end: 429 and a time to come
    again, and a disk that stays as it is."""

    def test_requests_of_a_worker(
        self, site: Site, post: Post, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(rates.WORKER_RATES, "lease", rates.Rate(0.5, 20))
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

    def test_leases(self, site: Site, post: Post) -> None:
        """However often it asks, it holds three; and asking writes nothing."""
        key, worker = site.worker()
        held = {granted(site, worker)[1].index for _ in range(2)}
        rows = len(ledger_rows(site))
        for _ in range(30):
            post(key, "/v1/leases", ASK)
        assert len(ledger_rows(site)) <= rows + 2
        assert len(held) == 2

    def test_new_keys_that_wait_for_a_lease(
        self, site: Site, post: Post, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Each event wakes all who wait: of keys without accepted work not thousands may."""
        monkeypatch.setattr(rates, "MAX_NEWCOMER_POLLS", 2)
        holders = [site.worker() for _ in range(2)]
        while any(client.lease(0.0) for _, client in holders):
            pass  # nothing is left to lease
        waiting = [site.worker()[0] for _ in range(2)]
        long = canonical_json({"wait": 2, "holding": []})
        with ThreadPoolExecutor(2) as threads:
            asked = [threads.submit(post, key, "/v1/leases", long) for key in waiting]
            late, refused = site.worker()[0], []

            def one_too_many() -> bool:
                refused.append(post(late, "/v1/leases", ASK))
                return refused[-1].status_code == 429

            eventually(one_too_many, "as many are waiting as may")
            assert refused[-1].headers["Retry-After"] == "5"
            assert [each.result(DEADLINE_S).status_code for each in asked] == [204, 204]
        assert post(late, "/v1/leases", ASK).status_code == 204

    def test_leases_given_back_again_and_again(self, site: Site) -> None:
        """Each return is a row of the ledger, and each grant of it again: one of both a lease."""
        _, worker = site.worker()
        seen = set()
        for _ in range(8):
            seen.add(granted(site, worker)[0])
            worker.release()
        written = [type(event).__name__ for event in ledger_rows(site)]
        assert written.count("LeaseReleased") == written.count("LeaseResumed") == len(seen) == 1

    def test_submissions_that_wait_for_a_verdict(self, site: Site, post: Post) -> None:
        workers = [site.worker() for _ in range(4)]
        leases = [(key, *granted(site, client)) for key, client in workers[:2]]
        for (key, data, lease), (_, client) in zip(leases, workers, strict=False):
            client.submit(*submission(data, lease, key))
        before = sizes(site)
        # when more is brought, though nothing was judged, again and again
        key, client = workers[0]
        answers = []
        for note in range(1, 20):
            envelope, table = submission(*leases[0][1:], key, note=note)
            raw = base64.b64encode(envelope).decode()
            answers.append(post(key, "/v1/submissions", table, **{ENVELOPE: raw}))
        # then nothing of it stays, and no more is leased
        assert {a.status_code for a in answers} <= {409, 429}
        assert client.lease(0.0) is None
        assert sizes(site) == before
        status = httpx.get(f"{site.url}/v1/status", verify=False).json()
        assert "verify.backlog.submissions is 2" in status["backlog"]["withheld"]

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
        monkeypatch.setattr(rates, "MAX_DOWNLOADS", 0)
        assert (ask().status_code, ask().headers["Retry-After"]) == (503, "5")
        assert post(key, "/v1/leases", ASK).status_code == 200

    def test_downloads_that_are_not_taken(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """They are being answered, and so make no room: there are few of them."""
        monkeypatch.setattr(rates, "MAX_DOWNLOADS_PER_PLACE", 2)
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
        """Each refusal would be a line, each malformed request a traceback: some are."""
        caplog.set_level("INFO")
        key, _ = site.worker()
        answers = {post(SigningKey.generate(), "/v1/leases", ASK).status_code for _ in range(60)}
        assert answers <= {403, 429}
        refusals = [r for r in caplog.records if r.name == "verify.coordinator.server"]
        assert LINES <= len(refusals) <= LINES + 5
        # and requests that are none are answered, and say nothing
        chunks = head(site, key, "/v1/leases", ASK).replace(
            f"Content-Length: {len(ASK)}".encode(), b"Transfer-Encoding: chunked"
        )
        for broken in (b"GARBAGE\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", chunks + b"no length\r\n"):
            with connected(site) as stream:
                stream.sendall(broken)
                assert b" 400 " in stream.recv(4096)
        assert [r.getMessage() for r in caplog.records if r.name == "aiohttp.server"] == []

    def test_a_status_that_takes_long_to_make(self) -> None:
        """Of thousands of keys it takes a second, and anybody may ask: it is made for many."""
        clock, made = [0.0], []

        def make() -> int:
            clock[0] += 0.5
            made.append(clock[0])
            return len(made)

        kept = Kept(make, lambda: clock[0])
        while clock[0] < 100.0:
            assert kept.get() == len(made)
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


def received(stream: socket.socket) -> bytes:
    try:
        return stream.recv(1)
    except ConnectionError:
        return b""


def ledger_rows(site: Site) -> list[object]:
    ledger = Ledger(site.run_dir / "state.db")
    try:
        return list(ledger.events())
    finally:
        ledger.close()


def sizes(site: Site) -> dict[str, int]:
    return {str(path): path.stat().st_size for path in stored(site)}


class TestSlowUpload:
    """One byte now and then, of a head or of a body: the connection ends, others are served."""

    @pytest.mark.parametrize(
        "at_once",
        [b"", b"POST /v1/leases HTTP/1.1\r\nHost: x\r\nX-Slow: "],
        ids=["nothing", "half a head"],
    )
    def test_of_a_head(self, site: Site, at_once: bytes) -> None:
        drops = b"" if not at_once else b"x" * 10_000
        if drops:
            assert dripped(site, at_once, drops) == b""
        else:
            with connected(site) as stream:
                assert received(stream) == b""

    def test_of_a_head_after_a_whole_request(self, site: Site) -> None:
        whole = b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"
        answer = dripped(site, whole + b"GET /healthz HTTP/1.1\r\nX: ", b"x" * 10_000)
        assert answer.startswith(b"HTTP/1.1 200 OK") and answer.count(b"HTTP/1.1") == 1

    @pytest.mark.parametrize("path", ["/v1/leases", "/v1/heartbeat", "/v1/release", "/v1/workers"])
    def test_of_a_requests_body(self, site: Site, path: str) -> None:
        key, _ = site.worker()
        body = b"{" + b" " * 10_000 + b"}"
        answer = dripped(site, head(site, key, path, body), body)
        assert b"408" in answer and b"the body took longer than" in answer

    def test_of_a_submission(self, site: Site) -> None:
        key, worker = site.worker()
        data, lease = granted(site, worker)
        envelope, table = submission(data, lease, key)
        answer = dripped(site, head(site, key, "/v1/submissions", table, envelope), table)
        assert b"408" in answer and b"the body took longer than" in answer
        # then nothing of it is left, and the lease is still good for who sends it in time
        eventually(lambda: stored(site) == [], "the half file is removed")
        worker.submit(envelope, table)

    def test_that_breaks_off(self, site: Site) -> None:
        key, worker = site.worker()
        data, lease = granted(site, worker)
        envelope, table = submission(data, lease, key)
        with connected(site) as stream:
            stream.sendall(head(site, key, "/v1/submissions", table, envelope) + table[:-1])
        eventually(lambda: stored(site) == [], "the half file is removed")
        worker.submit(envelope, table)

    def test_others_are_served_meanwhile(self, site: Site) -> None:
        keys = [site.worker()[0] for _ in range(4)]
        worker = site.worker()[1]
        with ExitStack() as held:
            for key in keys:
                stream = held.enter_context(connected(site))
                stream.sendall(head(site, key, "/v1/leases", b"{" + b" " * 100)[:-1])
                stream = held.enter_context(connected(site))
                stream.sendall(head(site, key, "/v1/leases", b"{" + b" " * 100) + b"{")
            assert granted(site, worker)[1].index == 0
            worker.heartbeat({"version": 0})

    async def test_of_an_answer_that_is_not_taken(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Asks for more than sockets hold, and reads none of it."""
        monkeypatch.setattr(connections, "IDLE_S", 0.3)

        async def large(request: web.Request) -> web.Response:
            return web.Response(body=bytes(32 << 20))

        callers = connections.Connections()
        application = web.Application(middlewares=[callers.answering])
        application.router.add_get("/", large)
        runner = web.AppRunner(application)
        await runner.setup()
        assert runner.server is not None
        listener = await callers.listen(runner.server, "127.0.0.1", 0)
        _, writer = await asyncio.open_connection(*listener.sockets[0].getsockname(), limit=1024)
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        async with asyncio.timeout(DEADLINE_S):
            while len(callers) == 0:
                await asyncio.sleep(0.01)
            while len(callers) > 0:
                await asyncio.sleep(0.01)
        writer.close()
        listener.close()
        await runner.cleanup()
