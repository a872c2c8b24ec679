"""Who sends or takes a byte now and then, of the real server over real sockets."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from aiohttp import web

from runspec.core.connection_limits import answering
from tests.attacks.impatient import (
    connected,
    dripped,
    head,
    impatient_site,
    received,
    stored,
)
from tests.verify.coordinator.deployment import DEADLINE_S, Site, submission
from tests.verify.coordinator.over_http import granted
from tests.waiting import eventually
from verify.coordinator import intake
from verify.coordinator.edge import bodies, limits
from verify.coordinator.services import leasing


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    with impatient_site(tmp_path, monkeypatch) as site:
        yield site


class TestSlowUpload:
    """One byte now and then, of a head or of a body: the connection ends, others are served."""

    def test_of_a_head(self, site: Site) -> None:
        begun = b"POST /v1/leases HTTP/1.1\r\nHost: x\r\nX-Slow: "
        assert dripped(site, begun, b"x" * 10_000) == b""
        with connected(site) as stream:  # and of nothing at all
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

    def test_that_breaks_off_once_all_has_come(
        self, site: Site, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """While its envelope is being written: neither that nor the file may stay, for there would
        be more of them each time, and no row that knows of them."""
        writing, written = threading.Event(), threading.Event()

        def slowly(path: Path, data: bytes) -> None:
            writing.set()
            time.sleep(0.5)  # in which the server hears that its caller is gone
            intake.write_small(path, data)
            written.set()

        key, worker = site.worker()
        data, lease = granted(site, worker)
        envelope, table = submission(data, lease, key)
        with monkeypatch.context() as patched:
            patched.setattr(leasing, "write_small", slowly)
            with connected(site) as stream:
                stream.sendall(head(site, key, "/v1/submissions", table, envelope) + table)
                assert writing.wait(DEADLINE_S)
            assert written.wait(DEADLINE_S)
        eventually(lambda: stored(site) == [], "nothing of it is left")
        worker.submit(envelope, table)

    def test_of_one_key_on_every_connection_that_there_may_be(self, site: Site) -> None:
        """Their bodies are due, so they count as idle: the oldest make room for others."""
        (key, _), worker = site.worker(), site.worker()[1]
        body = b"{" + b" " * 100
        with ExitStack() as held:
            for _ in range(limits.MAX_CONNECTIONS + 8):
                stream = held.enter_context(connected(site))
                stream.sendall(head(site, key, "/v1/leases", body) + b"{")
            began = time.monotonic()
            worker.heartbeat({"version": 0})
            assert time.monotonic() - began < bodies.BODY_S / 2

    async def test_of_an_answer_that_is_not_taken(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Asks for more than sockets hold, and reads none of it."""
        monkeypatch.setattr(limits, "IDLE_S", 0.3)

        async def large(request: web.Request) -> web.Response:
            return web.Response(body=bytes(32 << 20))

        callers = limits.Connections()
        application = web.Application(middlewares=[answering])
        application.router.add_get("/", large)
        runner = web.AppRunner(application)
        await runner.setup()
        assert runner.server is not None
        port = callers.listen(runner.server, "127.0.0.1", 0)
        _, writer = await asyncio.open_connection("127.0.0.1", port, limit=1024)
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        async with asyncio.timeout(DEADLINE_S):
            while len(callers) == 0:
                await asyncio.sleep(0.01)
            while len(callers) > 0:
                await asyncio.sleep(0.01)
        writer.close()
        await callers.close()
        await runner.cleanup()
