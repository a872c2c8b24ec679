"""Full disks. The kernel's limit on a process's files stands in for one: the same failed write.

The limit is soft, so that a test can free the space of a running process too.
"""

from __future__ import annotations

import resource
import subprocess
import sys

import pytest

from tests.waiting import eventually

from ..conftest import Run, contents, weights
from ..processes import Processes, broadcast

pytestmark = pytest.mark.slow

LIMITED = (
    "import resource, sys; from broadcast.__main__ import main; "
    "limit = int(sys.argv.pop(1)); "
    "resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY)); "
    "sys.exit(main(sys.argv[1:]))"
)
"""`python -m broadcast` on a disk with room for so many bytes a file."""


def with_room_for(size: int) -> tuple[str, ...]:
    return (sys.executable, "-c", LIMITED, str(size))


def free_the_disk(process: subprocess.Popen[bytes]) -> None:
    unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, unlimited)


def test_a_client_on_a_full_disk_names_nothing_and_resumes(run: Run, processes: Processes) -> None:
    # given a disk with room for a part of the weights
    run.publish(0, weights(50_000))
    server = run.static()
    out = run.folder / "out"
    fetch = ("fetch", server.url, "--run", "demo", "--out", out, "--public-key", run.root)
    # when a client fetches, then it ends with the reason and the place, and no version
    client = processes.start(*fetch, "--deadline", 20, command=with_room_for(20_000))
    assert client.wait(30) == 1
    assert "cannot write" in processes.said(client) and str(out) in processes.said(client)
    assert "File too large" in processes.said(client)
    assert "Traceback" not in processes.said(client)
    assert not (out / "v0").exists()
    # and once there is room, it has it
    done = broadcast(*fetch, "--deadline", 20)
    assert done.returncode == 0, done.stderr
    assert contents(out / "v0") == weights(50_000)


def test_a_relay_on_a_full_disk_says_so_and_goes_on_when_there_is_room(
    run: Run, processes: Processes
) -> None:
    # given a relay process on a disk with room for documents, and for half a chunk
    files = weights(100_000)
    run.publish(0, files, chunk_bytes=20_000)
    origin = run.origin()
    relay = processes.start(
        *("relay", "--run", "demo", "--upstream", origin.url, "--store", run.folder / "relay"),
        *("--listen", "127.0.0.1:0", "--public-key", run.root),
        command=with_room_for(10_000),
    )
    url = processes.url(relay)
    # when a client fetches from it and the origin, then the origin makes good what it cannot give
    path = run.client(url, origin.url).fetch(0, manifest_digest=None, deadline_s=20)
    assert contents(path) == files
    eventually(lambda: "File too large" in processes.said(relay), "the relay names its full disk")
    # and once there is room, the relay, which has lived on, serves all of it alone
    assert relay.poll() is None
    free_the_disk(relay)
    alone = run.client(url, cache="alone")
    assert contents(alone.fetch(0, manifest_digest=None, deadline_s=30)) == files
    assert "Traceback" not in processes.said(relay)
