"""A thousand connections that do nothing, and others that do worse: the rest are served."""

from __future__ import annotations

import resource
import socket
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from ..conftest import Run, contents, weights
from ..processes import COMMAND, Processes

pytestmark = pytest.mark.slow

IDLE = 1000
AS_USUAL = ("sh", "-c", 'ulimit -S -n 1024; exec "$@"', "sh", *COMMAND)
"""`python -m broadcast` with room for 1,024 files, as shells start processes."""


@pytest.fixture
def many_files() -> Iterator[None]:
    """Room for a thousand sockets in this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 4096)), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def connections(url: str, count: int, said: bytes, stack: ExitStack) -> None:
    """Opens connections, says something on each and no more."""
    host, _, port = url.removeprefix("http://").partition(":")
    for _ in range(count):
        connection = stack.enter_context(socket.socket())
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(20)
        connection.connect((host, int(port)))
        connection.sendall(said)


@pytest.mark.usefixtures("many_files")
@pytest.mark.parametrize("role", ["origin", "relay"])
def test_a_thousand_idle_connections_keep_nobody_waiting(
    run: Run, processes: Processes, role: str
) -> None:
    # given a server process, and a version whose chunks are larger than any socket's buffer
    big = weights(24_000_000)
    run.publish(0, big, chunk_bytes=12_000_000)
    server = processes.start("origin", run.store, "--listen", "127.0.0.1:0", command=AS_USUAL)
    url = processes.url(server)
    if role == "relay":
        server = processes.start(
            *("relay", "--run", "demo", "--upstream", url, "--store", run.folder / "relay"),
            *("--listen", "127.0.0.1:0", "--public-key", run.root),
            command=AS_USUAL,
        )
        url = processes.url(server)
    with ExitStack() as stack:
        # when a thousand connect and say nothing, some stop in the middle of a request, and some
        # ask for a chunk and never read it
        connections(url, IDLE, b"", stack)
        connections(url, 50, b"GET /demo/latest.json HTTP/1.1\r\nHost: x\r\nX-Long: ", stack)
        largest = max(run.chunks(), key=lambda path: path.stat().st_size).name
        ask = f"GET /demo/chunks/{largest} HTTP/1.1\r\nHost: x\r\n\r\n".encode()
        connections(url, 50, ask, stack)
        # then a client that comes after them has its version all the same
        path = run.client(url).fetch(0, manifest_digest=None, deadline_s=20)
        assert contents(path) == big
        assert server.poll() is None
