"""What every role process stands on: the HTTP client, limits of the connections to it, its figures
for Prometheus, files that appear whole or not at all, and exit codes.

`tests/broadcast` and `tests/verify` show what callers make of the client."""

import asyncio
import errno
import logging
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest
from aiohttp import web
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from runspec.core import http_server, process
from runspec.core.connection_limits import (
    ConnectionLimiter,
    ConnectionLimits,
    answering,
    connection_of,
)
from runspec.core.errors import UserError
from runspec.core.files import (
    atomic_file,
    read_bounded,
    write_atomic,
)
from runspec.core.http_client import LateAnswer, LongAnswer, NoAnswer, fetch, fetch_now, new_session
from runspec.core.http_server import counter, gauge, serve_metrics, serving
from tests.broadcast.fake_relay import Peer, Scripted
from tests.waiting import eventually

LOG = logging.getLogger("role")
LONG_S = 600.0
ASK = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
HALF = ASK[:-2] + b"Content-Length: 4\r\n\r\nhal"
CHUNKED = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n"
Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def test_an_upload_that_nobody_reads_ends_long_before_the_timeout():
    gave_up = threading.Event()

    def deaf(peer: Peer) -> None:
        gave_up.wait()
        peer.wait_for_the_end()

    limits = {"max_bytes": 10, "timeout_s": LONG_S, "idle_s": 0.3}
    with Scripted(deaf) as server:
        async with new_session() as session:
            with pytest.raises(LateAnswer, match=r"within 600\.0 s, or no byte for 0\.3 s"):
                await fetch(session, "POST", server.url, body=bytes(2**25), **limits)
            gave_up.set()
        await until(lambda: server.ended == 1)


def test_redirects_are_followed_only_as_often_as_is_allowed():
    def echo_of_the_head(peer: Peer) -> None:
        while head := peer.read_request():
            peer.answer(head)

    with Scripted(echo_of_the_head) as target:

        def elsewhere(peer: Peer) -> None:
            while peer.read_request():
                peer.answer(b"", "302 Found", f"Location: {target.url}/there")

        with Scripted(elsewhere) as server:
            limits = {"max_bytes": 1000, "timeout_s": LONG_S}
            assert fetch_now("GET", server.url, **limits).status == 302
            followed = fetch_now("GET", server.url, redirects=1, **limits)
            assert followed.content.startswith(b"GET /there HTTP/1.1")


def endless_body(peer: Peer) -> None:
    peer.send(b"HTTP/1.1 200 OK\r\n\r\n")
    peer.drip(b"x")


def endless_interim_answers(peer: Peer) -> None:
    peer.send(b"HTTP/1.1 100 Continue\r\n\r\n" * 100)
    peer.wait_for_the_end()


@pytest.mark.parametrize(
    ("script", "error", "message"),
    [
        (endless_body, LongAnswer, "more than the 5 bytes"),
        (lambda peer: peer.answer(b"123456"), LongAnswer, "6 bytes, at most 5 expected"),
        (endless_interim_answers, NoAnswer, "without end"),
    ],
)
def test_an_answer_without_end_is_given_up(script, error, message):
    def asked(peer: Peer) -> None:
        peer.read_request()
        script(peer)

    with Scripted(asked) as server, pytest.raises(error, match=message):
        fetch_now("GET", server.url, max_bytes=5, timeout_s=LONG_S)


def test_a_few_interim_answers_are_skipped():
    def hesitant(peer: Peer) -> None:
        peer.read_request()
        peer.send(b"HTTP/1.1 103 Early Hints\r\n\r\n" * 8)
        peer.answer(b"there")

    with Scripted(hesitant) as server:
        assert fetch_now("GET", server.url, max_bytes=5, timeout_s=LONG_S).content == b"there"


class Served:
    """A server whose answers wait until they are let go; it notes what its limiter tells it."""

    def __init__(self) -> None:
        self.go, self.asked = asyncio.Event(), 0
        self.dropped_for: list[str] = []
        self.malformed_as: list[int] = []
        self.dropped, self.malformed = self.dropped_for.append, self.malformed_as.append
        self.limiter: ConnectionLimiter
        self.port = 0

    async def answer(self, request: web.Request) -> web.Response:
        self.asked += 1
        with connection_of(request).receiving():
            body = await request.text()
        await self.go.wait()
        return web.Response(text=body or "done")

    async def connect(self, say: bytes = b"", *, asked: int | None = None) -> Stream:
        """A connection that says something, once so many requests have come in all."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(say)
        await until(lambda: asked in (None, self.asked))
        return reader, writer


@asynccontextmanager
async def served(**limits: Any) -> AsyncIterator[Served]:
    it = Served()
    application = web.Application(middlewares=[answering])
    application.router.add_route("*", "/", it.answer)
    chosen = {"connections": 8, "idle_s": LONG_S, "head_s": LONG_S, "header_bytes": 4096} | limits
    limited = ConnectionLimits(**chosen)
    async with serving(application, ("127.0.0.1", 0), limited, it, LOG) as (it.port, it.limiter):
        yield it


async def rest(stream: Stream) -> bytes:
    try:
        return await stream[0].read()
    except ConnectionResetError:
        return b""
    finally:
        stream[1].close()


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.005)


async def answered(*streams: Stream) -> None:
    for reader, writer in streams:
        assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")
        writer.close()


async def test_the_longest_idle_makes_room_and_who_is_answered_is_not_cut_off():
    async with served(connections=2) as it:
        # given a server that is full, of one that is being answered and one that does nothing
        busy = await it.connect(ASK, asked=1)
        idle = await it.connect()
        await until(lambda: len(it.limiter) == 2)
        # when another comes, then the idle one makes room
        second = await it.connect(ASK, asked=2)
        assert await rest(idle) == b""
        # and when all are being answered, the next is told to come again
        assert (await rest(await it.connect(ASK))).startswith(b"HTTP/1.1 503 ")
        it.go.set()
        await answered(busy, second)
        assert it.dropped_for == ["room", "full"]


async def test_a_connection_whose_body_is_due_makes_room_and_one_that_is_answered_does_not():
    async with served(connections=2) as it:
        slow = await it.connect(HALF, asked=1)
        busy = await it.connect(HALF + b"f", asked=2)
        other = await it.connect(ASK, asked=3)
        assert await rest(slow) == b""
        it.go.set()
        await answered(busy, other)
        assert it.dropped_for == ["room"]


async def test_half_a_head_and_an_idle_connection_end():
    async with served(head_s=0.05) as it:
        assert await rest(await it.connect(ASK[:10])) == b""
        assert (it.dropped_for, len(it.limiter)) == (["late head"], 0)
    async with served(idle_s=0.05) as it:
        it.go.set()
        assert (await rest(await it.connect(ASK))).startswith(b"HTTP/1.1 200 ")
        assert (it.dropped_for, len(it.limiter)) == (["idle"], 0)


async def test_malformed_requests_are_answered_and_witnessed():
    async with served() as it:
        for malformed in (b"\x00\x01\r\n\r\n", CHUNKED):
            assert (await rest(await it.connect(malformed))).startswith(b"HTTP/1.0 400 ")
        assert it.malformed_as == [400, 400]


class Figures(Collector):
    """Three figures, of which one is not known yet."""

    broken = False

    def collect(self) -> Iterator[Metric]:
        if self.broken:
            raise RuntimeError("a figure is broken")
        yield gauge("worker_version", "Version.", 3)
        yield gauge("worker_unknown", "Not known.", None)
        yield counter("worker_submissions", "By answer.", {"accepted": 2, "refused": 0}, "answer")


def test_a_role_has_its_figures_and_one_that_breaks_costs_one_answer(monkeypatch, capfd):
    # given a role that serves its figures at any free port
    figures, ports, start = Figures(), list[int](), http_server.start_http_server
    monkeypatch.setattr(
        *(http_server, "start_http_server"),
        lambda *where, **what: ports.append(start(*where, **what)[0].server_port),
    )
    serve_metrics("127.0.0.1:0", figures, LOG)
    eventually(lambda: ports, "the server")

    def answer() -> list[str]:
        with urlopen(f"http://127.0.0.1:{ports[0]}/metrics") as answered:
            return answered.read().decode().splitlines()

    # when it is asked, then they are there, and those of its process
    lines = answer()
    assert "runspec_worker_version 3.0" in lines
    assert 'runspec_worker_submissions_total{answer="accepted"} 2.0' in lines
    assert any(line.startswith("process_resident_memory_bytes ") for line in lines)
    # and what is not known has no value
    assert not any(line.startswith("runspec_worker_unknown ") for line in lines)
    # and a figure that breaks costs one answer
    figures.broken = True
    with pytest.raises(HTTPError):
        answer()
    figures.broken = False
    assert "runspec_worker_version 3.0" in answer()


@pytest.mark.parametrize("listen", ["taken", "192.0.2.1:8000", "8000"])
def test_without_its_address_a_role_goes_on_and_says_so(listen, caplog):
    with socket.create_server(("127.0.0.1", 0)) as server:
        if listen == "taken":
            listen = f"127.0.0.1:{server.getsockname()[1]}"
        serve_metrics(listen, Figures(), LOG)
        eventually(lambda: caplog.records, "the warning")
    [record] = caplog.records
    assert record.getMessage().startswith(f"no metrics at {listen}, going on without: ")


def test_write_atomic_does_not_write_into_the_file_that_was_there(tmp_path):
    path, reader = tmp_path / "file", tmp_path / "reader"
    write_atomic(path, b"old")
    reader.hardlink_to(path)
    write_atomic(path, b"new")
    assert (path.read_bytes(), reader.read_bytes()) == (b"new", b"old")
    # and where it cannot write, it names the file and leaves nothing
    (tmp_path / "taken").mkdir()
    with pytest.raises(UserError, match="taken"):
        write_atomic(tmp_path / "taken", b"data")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["file", "reader", "taken"]


def test_a_file_appears_only_when_its_block_succeeds(tmp_path):
    # given a file that is written anew, piece by piece
    path = tmp_path / "rows"
    path.write_bytes(b"old")
    # when the block fails half way, then the old one stands and nothing lies beside it
    with pytest.raises(ZeroDivisionError), atomic_file(path) as file:
        file.write(b"half")
        raise ZeroDivisionError
    assert (path.read_bytes(), list(tmp_path.iterdir())) == (b"old", [path])
    # when the disk fails, then the message names the file and what to do
    with (
        pytest.raises(UserError, match="No space left") as failure,
        atomic_file(path, remedy="free some") as file,
    ):
        file.write(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")
    assert (failure.value.place, failure.value.remedy) == (str(path), "free some")
    assert (path.read_bytes(), list(tmp_path.iterdir())) == (b"old", [path])
    # when it succeeds, then all of it is there under its name, and only then
    with atomic_file(path, mode=0o600) as file:
        file.write(b"who")
        assert path.read_bytes() == b"old"
        file.write(b"le")
    assert (path.read_bytes(), list(tmp_path.iterdir())) == (b"whole", [path])
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_read_bounded_refuses_one_byte_too_many(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"12345")
    assert read_bounded(path, 5) == b"12345"
    with pytest.raises(UserError, match="4 bytes allowed"):
        read_bounded(path, 4)


def fails(error: Exception, cause: Exception | None = None) -> Callable[[], None]:
    def load() -> None:
        raise error from cause

    return load


FULL = OSError(errno.ENOSPC, "no space left")


@pytest.mark.parametrize(
    ("body", "code", "said"),
    [
        (fails(UserError("port 1 is taken", remedy="wait")), 1, "remedy: wait"),
        # what follows from the spec is not retried, unless it may pass
        (process.not_retried()(fails(UserError("gone"), FileNotFoundError("a"))), 4, "gone"),
        (process.not_retried()(fails(process.RunStopped("stalled"))), 4, "stalled"),
        (process.not_retried()(fails(KeyError("gold"))), 4, "KeyError: 'gold' at"),
        (process.not_retried()(fails(UserError("full"), FULL)), 1, "full"),
        (process.not_retried()(fails(MemoryError("too little"))), 3, "too little"),
    ],
)
def test_exit_codes_tell_a_persons_error_from_ours(body, code, said, capsys):
    assert process.run_role("tester", lambda log: body()) == code
    printed = capsys.readouterr().err
    assert said in printed and "tester" in printed


ROLE = """
import os, pathlib
from runspec.core.process import run_role, stop_event
def body(log):
    event = stop_event()
    pathlib.Path("pid").write_text(str(os.getpid()))
    event.wait(900)
raise SystemExit(run_role("role", body))
"""
linux = pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG is Linux's")


@linux
def test_a_role_whose_supervisor_died_before_it_began_ends_at_once(tmp_path):
    # given a supervisor that is gone, so that another process is the role's parent
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    # when the role starts, then it ends before its work begins
    environment = os.environ | {process.SUPERVISOR: str(gone.pid)}
    ended = subprocess.run([sys.executable, "-c", ROLE], env=environment, cwd=tmp_path)
    assert (ended.returncode, list(tmp_path.iterdir())) == (-signal.SIGTERM, [])
