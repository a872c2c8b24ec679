"""Processes that die in the middle, and are started again: nothing is lost, nothing is wrong."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from broadcast.manifest import Chunk, read_manifest
from runspec.core.hashing import digest_bytes, is_digest
from tests.waiting import eventually

from ..conftest import CHUNK_BYTES, Run, contents, weights
from ..fake_relay import FakeRelay, held_until, honest, only
from ..processes import Processes, broadcast
from .conftest import within

pytestmark = pytest.mark.slow

CHUNKS = 22
FILES = weights(CHUNKS * CHUNK_BYTES - 500)
THROTTLE = (sys.executable, "-m", "tests.throttle")
HALF_A_SECOND_BITS = CHUNKS * CHUNK_BYTES * 8 * 2
"""Bits a second at which the weights take half a second."""


def chunks_of_weights(run: Run) -> tuple[Chunk, ...]:
    return read_manifest(run.store / "demo/versions/0").objects["model.safetensors"].chunks


def held_by_client(run: Run, out: Path) -> set[str]:
    """Chunks of the weights that lie whole in a client's partial download."""
    partial_file = out / ".partial-v0" / "model.safetensors"
    data = partial_file.read_bytes() if partial_file.exists() else b""
    pieces = [data[at : at + CHUNK_BYTES] for at in range(0, len(data), CHUNK_BYTES)]
    return {digest_bytes(piece) for piece in pieces} & {c.blake3 for c in chunks_of_weights(run)}


def held_by_relay(run: Run, name: str = "relay") -> set[str]:
    folder = run.folder / name / "demo" / "chunks"
    return {path.name for path in folder.glob("*") if is_digest(path.name)}


def relay_arguments(run: Run, upstream: str, name: str, listen: str = "127.0.0.1:0") -> list[str]:
    store = str(run.folder / name)
    said = ["relay", "--run", "demo", "--upstream", upstream, "--store", store]
    return [*said, "--listen", listen, "--public-key", run.root]


def link_to(processes: Processes, url: str, bits_per_s: float) -> str:
    """The URL of a slow link to a server, which stays while the server is restarted."""
    link = processes.start(bits_per_s, address_of(url), command=THROTTLE)
    form = re.compile(r"^(http://\S+)$", re.MULTILINE)
    eventually(lambda: form.search(processes.said(link)) is not None, "the link listens")
    return form.findall(processes.said(link))[0]


def kill(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


def address_of(url: str) -> str:
    return url.removeprefix("http://")


def stops_after_ten(server: FakeRelay) -> threading.Event:
    """Ten chunks are answered, the rest only once the event is set."""
    going_on = threading.Event()
    server.answer("/chunks/", only(10, honest, then=held_until(going_on)))
    return going_on


def test_a_client_killed_at_ten_of_22_chunks_fetches_the_other_twelve(
    run: Run, processes: Processes
) -> None:
    # given a client process with ten chunks on disk (one may be config.json's)
    run.publish(0, FILES)
    server = run.static()
    going_on = stops_after_ten(server)
    out = run.folder / "out"
    what = ("--run", "demo", "--out", out, "--public-key", run.root)
    client = processes.start("fetch", server.url, *what)
    eventually(lambda: len(held_by_client(run, out)) >= 9, "nine chunks of weights are on disk")
    # when it is killed and another one started
    kill(client)
    had = held_by_client(run, out)
    assert not (out / "v0").exists()
    going_on.set()
    other = run.static()  # the first may still be reading what the dead client asked of it
    again = broadcast("fetch", other.url, *what, "--deadline", 20)
    # then that one asks for what is missing, once, and for nothing else
    assert again.returncode == 0, again.stderr
    assert contents(out / "v0") == FILES
    assert not (out / ".partial-v0").exists()
    missing = {c.blake3 for c in chunks_of_weights(run)} - had
    assert {c.blake3: other.asked(c.blake3) for c in chunks_of_weights(run)} == {
        c.blake3: int(c.blake3 in missing) for c in chunks_of_weights(run)
    }


def test_a_relay_killed_at_ten_of_22_chunks_is_passed_over_and_resumes(
    run: Run, processes: Processes
) -> None:
    # given a relay process with ten chunks, and a client that knows it and another server
    run.publish(0, FILES)
    upstream = run.static()
    going_on = stops_after_ten(upstream)
    first = processes.start(*relay_arguments(run, upstream.url, "relay"))
    client = run.client(processes.url(first), run.static().url)
    eventually(lambda: len(held_by_relay(run)) >= 10, "ten chunks are at the relay")
    # when the relay is killed in the middle of the client's fetch
    with ThreadPoolExecutor(1) as pool:
        fetch = pool.submit(client.fetch, 0, manifest_digest=None, deadline_s=20)
        kill(first)
        # then the client finishes with the other
        assert contents(fetch.result()) == FILES
    # and the relay, started again, fetches what it has not got, and serves all
    had = held_by_relay(run)
    going_on.set()
    upstream.paths.clear()
    again = processes.start(*relay_arguments(run, upstream.url, "relay"))
    through = run.client(processes.url(again), cache="through")
    assert contents(through.fetch(0, manifest_digest=None, deadline_s=20)) == FILES
    assert {p.name: upstream.asked(p.name) for p in run.chunks()} == {
        p.name: int(p.name not in had) for p in run.chunks()
    }


def test_all_relays_die_and_come_back_while_a_client_waits(run: Run, processes: Processes) -> None:
    # given two relay processes behind slow links, and a client with a part of the version
    run.publish(0, FILES)
    origin = run.origin()
    relays = [processes.start(*relay_arguments(run, origin.url, name)) for name in "ab"]
    urls = [processes.url(relay) for relay in relays]
    for name in "ab":
        eventually(lambda name=name: len(held_by_relay(run, name)) == 23, "the relay has all")
    links = [link_to(processes, url, HALF_A_SECOND_BITS / 4) for url in urls]
    client = run.client(*links)
    fetch = partial(client.fetch, 0, manifest_digest=None, deadline_s=30)
    with ThreadPoolExecutor(1) as pool, within(30):
        fetched = pool.submit(fetch)
        cache = run.folder / "cache"
        eventually(lambda: len(held_by_client(run, cache)) >= 3, "three chunks have arrived")
        # when both die, and come back on the same ports
        for relay in relays:
            kill(relay)
        had = held_by_client(run, cache)
        assert not fetched.done() and len(had) < CHUNKS
        for name, url in zip("ab", urls, strict=True):
            processes.start(*relay_arguments(run, origin.url, name, address_of(url)))
        # then the client, which waited, finishes
        assert contents(fetched.result()) == FILES


def test_an_origin_restarted_in_the_middle_of_a_version(run: Run, processes: Processes) -> None:
    # given an origin process, a relay behind a slow link to it, and a version half way across
    run.publish(0, FILES)
    origin = processes.start("origin", run.store, "--listen", "127.0.0.1:0")
    url = processes.url(origin)
    relay = run.relay(link_to(processes, url, HALF_A_SECOND_BITS / 2))
    client = run.client(relay.url)
    with ThreadPoolExecutor(1) as pool:
        fetched = pool.submit(client.fetch, 0, manifest_digest=None, deadline_s=30)
        eventually(lambda: len(held_by_relay(run)) >= 3, "three chunks are at the relay")
        # when the origin dies, and comes back on the same port
        kill(origin)
        assert not fetched.done()
        processes.start("origin", run.store, "--listen", address_of(url))
        # then the version arrives through the relay, and news after it
        assert contents(fetched.result()) == FILES
    run.publish(1, weights(seed=1))
    latest = client.latest(0, 20)
    assert latest is not None and latest.version == 1
    assert contents(client.fetch(1, manifest_digest=None, deadline_s=10)) == weights(seed=1)


@pytest.mark.parametrize("role", ["origin", "relay"])
def test_a_publisher_killed_in_the_middle_leaves_a_store_that_serves(run: Run, role: str) -> None:
    # given a published version, and a publisher that dies with the next one's chunks half written
    run.publish(0, weights())
    chunks = run.store / "demo" / "chunks"
    (chunks / ".tmp-half-written").write_bytes(b"x" * 100)
    (chunks / ("0" * 64)).write_bytes(b"of a manifest that never came")
    server = run.origin() if role == "origin" else run.relay(run.origin().url)
    # when a client comes, then it gets the old version; and the next one after the restart
    client = run.client(server.url)
    assert contents(client.fetch(0, manifest_digest=None, deadline_s=10)) == weights()
    run.publish(1, weights(seed=1))
    latest = client.latest(0, 10)
    assert latest is not None and latest.version == 1
    assert contents(client.fetch(1, manifest_digest=None, deadline_s=10)) == weights(seed=1)
