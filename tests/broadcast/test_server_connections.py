"""Many connections, slow ones, and ones that say nothing: none keeps another from being served."""

from __future__ import annotations

import resource
import select
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import httpx
import pytest

from broadcast.server import Limits, ServerOptions
from runspec.core.connection_limits import possible_connections
from tests.waiting import eventually

from .conftest import LOG, Run, Served, large_chunk, weights

HEALTH = b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"
POLL = b"GET /demo/latest.json?after=0&wait=60 HTTP/1.1\r\nHost: x\r\n\r\n"
POLLS = "runspec_broadcast_polls_waiting"
DROPPED = "runspec_broadcast_connections_dropped_total"
OK = b"HTTP/1.1 200"


def metric(url: str, name: str) -> float:
    """The value of one line of a server's metrics; 0 where there is none."""
    for line in httpx.get(f"{url}/metrics").text.splitlines():
        if line.startswith(f"{name} "):
            return float(line.rpartition(" ")[2])
    return 0.0


Connect = Callable[..., socket.socket]


@pytest.fixture
def connect() -> Iterator[Connect]:
    """Opens connections to a port, closed with the test."""
    with ExitStack() as stack:

        def connect(
            port: int, *, say: bytes = b"", address: str = "127.0.0.1", buffer: int = 0
        ) -> socket.socket:
            connection = stack.enter_context(socket.socket())
            if buffer:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
            connection.bind((address, 0))
            connection.settimeout(30)
            connection.connect(("127.0.0.1", port))
            connection.sendall(say)
            return connection

        yield connect


def rest(connection: socket.socket, enough: int = sys.maxsize) -> int:
    """Bytes that still come until the server ends a connection, or until there are enough."""
    received = 0
    with suppress(ConnectionResetError):
        while received < enough and (data := connection.recv(1024 * 1024)):
            received += len(data)
    return received


def still_open(connection: socket.socket) -> bool:
    return not select.select([connection], [], [], 0)[0]


def asking_for(chunk: Path) -> bytes:
    return f"GET /demo/chunks/{chunk.name} HTTP/1.1\r\nHost: x\r\n\r\n".encode()


def limited(run: Run, max_connections: int = 4096, **limits: float) -> Served:
    run.publish(0, weights())
    return run.origin(
        options=ServerOptions(max_connections=max_connections, limits=Limits(**limits))  # type: ignore[arg-type]
    )


def test_a_head_in_drips_has_no_more_time(run: Run, connect: Connect) -> None:
    served = limited(run, head_s=0.3)
    connection = connect(served.port, say=b"GET /healthz HTTP/1.1\r\nX: ")

    def drip() -> bool:
        try:
            connection.sendall(b"x")
        except OSError:
            return True
        return not still_open(connection)

    eventually(drip, "it is ended", poll_s=0.02)
    assert metric(served.url, f'{DROPPED}{{why="late head"}}') == 1


def test_a_client_has_half_of_the_places_at_most(run: Run, connect: Connect) -> None:
    served = limited(run, max_connections=6)
    for _ in range(3):
        connect(served.port, say=POLL)
    eventually(lambda: metric(served.url, POLLS) == 3, "they wait")

    assert connect(served.port, say=POLL).recv(12) == b"HTTP/1.1 429"
    connect(served.port, say=POLL, address="127.0.0.2")
    eventually(lambda: metric(served.url, POLLS) == 4, "another's does too")


def test_a_poll_ends_with_its_client(run: Run, connect: Connect) -> None:
    served = limited(run)
    connection = connect(served.port, say=POLL)
    eventually(lambda: metric(served.url, POLLS) == 1, "it waits")

    connection.close()

    eventually(lambda: metric(served.url, POLLS) == 0, "nobody waits")
    gone = 'runspec_broadcast_requests_total{status="499",what="latest"}'
    eventually(lambda: metric(served.url, gone) == 1, "it is counted")


def test_a_reader_below_the_floor_is_disconnected(run: Run, connect: Connect) -> None:
    # given a server that wants 4 MiB to be taken in a second
    served = limited(run, floor_bytes_per_s=4 * 1024 * 1024)
    large = large_chunk(run)
    asked = asking_for(large)
    # when a reader takes nothing
    stalled = connect(served.port, say=asked, buffer=4096)
    assert stalled.recv(12) == OK
    eventually(
        lambda: metric(served.url, f'{DROPPED}{{why="slow reader"}}') == 1,
        "it is disconnected",
    )
    # then it is cut off, and one that reads is not
    assert metric(served.url, "runspec_broadcast_transfers") == 0
    assert rest(stalled) < large.stat().st_size
    reader = connect(served.port, say=asked)
    assert rest(reader, large.stat().st_size) >= large.stat().st_size


def test_a_server_stops_under_load(run: Run, connect: Connect) -> None:
    """Within seconds, whoever is connected: a stalled reader, a poll, an idle one, half a head."""
    served = limited(run)
    large = large_chunk(run)
    stalled = connect(
        served.port,
        say=asking_for(large),
        buffer=4096,
    )
    assert stalled.recv(12) == OK
    others = [connect(served.port, say=said) for said in (POLL, HEALTH, b"", b"GET /")]
    eventually(lambda: metric(served.url, POLLS) == 1, "it waits")

    served.stop()

    for connection in (stalled, *others):
        assert rest(connection) < large.stat().st_size


def test_as_many_files_as_there_may_be(caplog: pytest.LogCaptureFixture) -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (512, before[1]))
        # the soft limit is raised as far as is needed
        assert possible_connections(200, LOG, files_each=2, files_beside=256) == 200
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 2 * 200 + 256
        assert caplog.messages == []
        # and where the hard one is lower, there are fewer connections, which is said
        possible = possible_connections(before[1], LOG, files_each=2, files_beside=256)
        assert possible == (before[1] - 256) // 2
        assert f"not {before[1]}" in caplog.text
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
