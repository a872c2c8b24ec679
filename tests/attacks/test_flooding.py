"""Who asks too often or with too much, or sends and takes a byte now and then, of the real server
over real sockets."""

from __future__ import annotations

import asyncio
import base64
import itertools
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path

import httpx
import pytest
from aiohttp import web

from runspec.core.canonical import canonical_json
from runspec.core.connection_limits import answering
from runspec.core.schema import Backlog
from runspec.core.schema.role_names import worker_names
from runspec.core.signed import SigningKey
from tests.verify.coordinator.deployment import RUN, Site, submission, tiny_spec
from tests.verify.coordinator.over_http import granted, post, request
from tests.waiting import eventually
from verify.coordinator import authentication as limits
from verify.coordinator import handlers, requests
from verify.coordinator.handlers.public import Cache
from verify.coordinator.ledger import Ledger
from verify.coordinator_http import ENVELOPE, sign_request

pytestmark = pytest.mark.slow

PATIENCE_S = 600.0
CONNECTIONS = 24
ASK = canonical_json({"wait": 0, "holding": []})


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """A coordinator of little room, and of patience that no test meets: one that does says so."""
    for name, value in (("IDLE_S", PATIENCE_S), ("HEAD_S", PATIENCE_S), ("LINGER_S", 0.2)):
        monkeypatch.setattr(limits, name, value)
    monkeypatch.setattr(limits, "MAX_CONNECTIONS", CONNECTIONS)
    spec = tiny_spec()
    backlog = Backlog.model_validate({"submissions": 2})
    verify = spec.verify.model_copy(update={"backlog": backlog})
    site = Site(tmp_path, spec.model_copy(update={"verify": verify}))
    site.publish(0)
    with site.origin(), site.serving():
        yield site


def connected(site: Site) -> socket.socket:
    host, port = site.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=PATIENCE_S)


def received(stream: socket.socket) -> bytes:
    with suppress(ConnectionError):
        return stream.recv(1)
    return b""


def stored(site: Site) -> list[Path]:
    return [p for p in site.run_dir.glob("rollouts/**/*") if p.is_file()]


def head(site: Site, key: SigningKey, path: str, body: bytes, envelope: bytes = b"") -> bytes:
    """The head of a signed request that announces this body."""
    headers = sign_request(key, run=RUN, method="POST", path=path, body=body)
    headers |= {"Host": "coordinator", "Content-Length": str(len(body))}
    headers |= {ENVELOPE: base64.b64encode(envelope).decode()} if envelope else {}
    lines = [f"POST {path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


def leases(site: Site, key: SigningKey) -> httpx.Response:
    return post(site, key, "/v1/leases", ASK)


class TestFlooding:
    """Requests, keys, leases, submissions and connections without end: 429 and a time to come
    again, and a disk that stays as it is (rates: `tests/verify/coordinator/test_limits.py`)."""

    def test_new_keys_that_wait_for_a_lease(
        self, site: Site, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """An event with work looks at all who wait: of keys without accepted work not all may."""
        monkeypatch.setitem(limits.AT_ONCE, ("all", "newcomer poll"), 2)
        monkeypatch.setitem(limits.RATES, ("key", "lease"), limits.Rate(1e6, 10**6))
        holders = [site.worker(invited=False) for _ in range(2)]
        granted(site, holders[0][1])
        while any(client.lease(0.0) for _, client in holders):
            pass  # nothing is left to lease to new keys
        waiting = [site.worker(invited=False)[0] for _ in range(2)]
        long = canonical_json({"wait": 2, "holding": []})

        def wait_long(key: SigningKey) -> httpx.Response:
            while (answer := post(site, key, "/v1/leases", long)).status_code == 429:
                pass  # the late one was there at this moment
            return answer

        with ThreadPoolExecutor(2) as threads:
            asked = [threads.submit(wait_long, key) for key in waiting]
            late, refused = site.worker(invited=False)[0], []

            def one_too_many() -> bool:
                refused.append(leases(site, late))
                return refused[-1].status_code == 429 or all(each.done() for each in asked)

            eventually(one_too_many, "as many are waiting as may")
            assert [each.result().status_code for each in asked] == [204, 204]
        assert refused[-1].status_code == 204 or refused[-1].headers["Retry-After"] == "5"
        assert leases(site, late).status_code == 204

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
            refused = leases(site, stranger)
            assert (refused.status_code, refused.headers["Retry-After"]) == (429, "5")
            assert granted(site, worker)[1].index == 0

    def test_leases_given_back_again_and_again(self, site: Site) -> None:
        """Each return and each grant is a row of the ledger. What new keys gave back takes up their
        share of the step until it ends, so soon there is nothing to give back."""
        _, worker = site.worker(invited=False)
        granted(site, worker)
        for _ in range(8):
            worker.release()
            worker.lease(0.0)
        ledger = Ledger(site.run_dir / "state.db")
        written = [type(event).__name__ for event in ledger.events()]
        ledger.close()
        assert written.count("LeaseReleased") == written.count("LeaseGranted") == 2

    def test_a_body_larger_than_announced_or_allowed(self, site: Site) -> None:
        key, client = site.worker()
        envelope, table = submission(*granted(site, client), key)
        signed = sign_request(key, run=RUN, method="POST", path="/v1/submissions", body=table)
        signed[ENVELOPE] = base64.b64encode(envelope).decode()

        def endless() -> Iterator[bytes]:
            yield table
            for _ in range(1000):
                yield bytes(1 << 16)

        answer = request(site, "POST", "/v1/submissions", content=endless(), headers=signed)
        assert (answer.status_code, stored(site)) == (413, [])
        client.submit(envelope, table)  # the lease is still good

    def test_a_large_status_is_sent_to_few_at_once(
        self, site: Site, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(handlers, "_SMALL_BYTES", 100)
        key, worker = site.worker()
        granted(site, worker)
        ask = lambda: request(site, "GET", "/v1/status")  # noqa: E731
        assert [each["key"] for each in ask().json()["workers"]] == [key.public_hex]
        monkeypatch.setitem(limits.AT_ONCE, ("all", "download"), 0)
        assert (ask().status_code, ask().headers["Retry-After"]) == (503, "5")
        assert leases(site, key).status_code == 200

    def test_lines_in_the_log(self, site: Site, caplog: pytest.LogCaptureFixture) -> None:
        """Each refusal would be a line, each malformed request a traceback: none is."""
        key, _ = site.worker()
        caplog.set_level("INFO")
        codes = {leases(site, SigningKey.generate()).status_code for _ in range(40)}
        assert codes <= {403, 429}
        # and requests that are none are answered too
        length = f"Content-Length: {len(ASK)}".encode()
        chunks = head(site, key, "/v1/leases", ASK).replace(length, b"Transfer-Encoding: chunked")
        for broken in (b"GARBAGE\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", chunks + b"no length\r\n"):
            with connected(site) as stream:
                stream.sendall(broken)
                assert b" 400 " in stream.recv(4096)
        logged = {"verify.coordinator.run", "aiohttp.server"}
        lines = {r.getMessage() for r in caplog.records if r.name in logged}
        assert lines <= {"version 0 is published"}  # which may come late

    def test_a_status_that_takes_long_to_make(self) -> None:
        """Of thousands of keys it takes a second, and anybody may ask: it is made for many."""
        clock, made = [0.0], list[float]()

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

    def test_connections(self, site: Site) -> None:
        """Three times as many as there may be: the idle make room for those who work, and so do
        those whose body is due."""
        key, worker = site.worker()
        granted(site, worker)
        body = b"{" + b" " * 100
        begun = head(site, key, "/v1/leases", body) + b"{"
        with ExitStack() as held:
            streams = [held.enter_context(connected(site)) for _ in range(3 * CONNECTIONS)]
            for stream in streams[-CONNECTIONS:]:
                with suppress(ConnectionError):
                    stream.sendall(begun)
            for _ in range(3):
                worker.heartbeat({"version": 0})
                assert leases(site, key).status_code == 200
            assert all(not received(stream) for stream in streams[:CONNECTIONS])


Deadlines = Callable[..., None]


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> Deadlines:
    """Makes one of the deadlines tiny: it must fire."""
    owners = {"IDLE_S": limits, "HEAD_S": limits, "BODY_S": requests, "UPLOAD_TIMEOUT_S": requests}
    return lambda name: monkeypatch.setattr(owners[name], name, 0.3)


def dripped(site: Site, at_once: bytes, drops: bytes = b"x" * 100_000) -> bytes:
    """Sends some bytes at once and others one by one, until the server ends the connection; what
    it answered."""
    answer = b""
    with connected(site) as stream:
        stream.sendall(at_once)
        stream.settimeout(0.02)
        for drop in drops:
            try:
                stream.sendall(bytes([drop]))
                if not (piece := stream.recv(4096)):
                    return answer
                answer += piece
            except TimeoutError:
                continue
            except ConnectionError:
                return answer
    pytest.fail("the server took all of it")


class TestSlowUpload:
    """One byte now and then, of a head or of a body: the connection ends, others are served."""

    def test_of_a_head(self, tmp_path: Path, short: Deadlines) -> None:
        short("HEAD_S")
        short("IDLE_S")
        site = Site(tmp_path, tiny_spec())
        site.publish(0)
        with site.origin(), site.serving():
            assert dripped(site, b"POST /v1/leases HTTP/1.1\r\nHost: x\r\nX-Slow: ") == b""
            with connected(site) as stream:  # and of nothing at all
                assert received(stream) == b""
            # and after a whole request, unless that came too late itself
            whole = b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"
            while not (answer := dripped(site, whole + b"GET /healthz HTTP/1.1\r\nX: ")):
                pass
            assert answer.startswith(b"HTTP/1.1 200 OK") and answer.count(b"HTTP/1.1") == 1

    @pytest.mark.parametrize("path", ["/v1/leases", "/v1/heartbeat", "/v1/release", "/v1/workers"])
    def test_of_a_requests_body(self, site: Site, short: Deadlines, path: str) -> None:
        short("BODY_S")
        key, body = SigningKey.generate(), b"{" + b" " * 100_000 + b"}"
        answer = dripped(site, head(site, key, path, body), body)
        assert b"408" in answer and b"the body took longer than" in answer

    def test_of_a_submission(self, site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
        key, worker = site.worker()
        envelope, table = submission(*granted(site, worker), key)
        with monkeypatch.context() as patch:
            patch.setattr(requests, "UPLOAD_TIMEOUT_S", 0.3)
            answer = dripped(site, head(site, key, "/v1/submissions", table, envelope), table)
        assert b"408" in answer and b"the body took longer than" in answer
        # then nothing of it is left, and the lease is still good for who sends it in time
        eventually(lambda: stored(site) == [], "the half file is removed")
        worker.submit(envelope, table)

    def test_that_breaks_off_once_all_has_come(
        self, site: Site, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """While its envelope is being written: neither that nor the file may stay, for there would
        be more of them each time, and no row that knows of them."""
        writing, gone, written = (threading.Event() for _ in range(3))
        write_small = requests.write_small

        def slowly(path: Path, data: bytes) -> None:
            writing.set()
            gone.wait(PATIENCE_S)
            write_small(path, data)
            written.set()

        key, worker = site.worker()
        envelope, table = submission(*granted(site, worker), key)
        with monkeypatch.context() as patched:
            patched.setattr(requests, "write_small", slowly)
            with connected(site) as stream:
                stream.sendall(head(site, key, "/v1/submissions", table, envelope) + table)
                assert writing.wait(PATIENCE_S)
            # the server hears that its caller is gone: it answers others after that
            for _ in range(3):
                worker.heartbeat({"version": 0})
            gone.set()
            assert written.wait(PATIENCE_S)
        eventually(lambda: stored(site) == [], "nothing of it is left")
        worker.submit(envelope, table)

    async def test_of_an_answer_that_is_not_taken(self, short: Deadlines) -> None:
        """Asks for more than sockets hold, and reads none of it."""
        short("IDLE_S")

        async def large(request: web.Request) -> web.Response:
            return web.Response(body=bytes(32 << 20))

        application = web.Application(middlewares=[answering])
        application.router.add_get("/", large)
        async with limits.Connections().serving(application, "127.0.0.1", 0) as (port, callers):
            _, writer = await asyncio.open_connection("127.0.0.1", port, limit=1024)
            writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            for count in (1, 0):
                while len(callers) != count:
                    await asyncio.sleep(0.005)
            writer.close()
