"""What a relay brings, in which order, and what it leaves be."""

from __future__ import annotations

import logging
import socket
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from broadcast.manifest import WeightsManifest, read_manifest
from broadcast.relay import run_relay, to_rebuild
from broadcast.server import ServerOptions
from broadcast.source import Recent
from runspec.core.errors import UserError
from runspec.core.hashing import digest_bytes
from tests.waiting import eventually

from .conftest import CHUNK_BYTES, Run, contents, weights
from .fake_relay import held_until, silent

OLD = "versions/0/manifest.json"


def manifest(run: Run, version: int) -> WeightsManifest:
    return read_manifest(run.store / run.name / "versions" / str(version))


def delta_of(version: int) -> dict[str, bytes]:
    return {"model.safetensors.delta": b"%08d" % version * 150}


def publish_chain(run: Run, length: int) -> None:
    """Version 0 whole, and so many deltas after it."""
    run.publish(0, weights(), delta={})
    for version in range(1, length + 1):
        run.publish(version, weights(), version - 1, delta=delta_of(version), whole=False)


def held(run: Run, folder: str = "relay") -> set[str]:
    chunks = run.folder / folder / run.name / "chunks"
    return {path.name for path in run.chunks(folder)} if chunks.exists() else set()


def size_of(folder: Path) -> int:
    """Bytes of manifests and chunks, those on their way included."""
    paths = [*folder.glob("chunks/*"), *folder.glob("versions/*/*")]
    return sum(path.stat().st_size for path in paths)


def asked_chunks(paths: list[str]) -> list[str]:
    return [path.rpartition("/")[2] for path in paths if "/chunks/" in path]


def test_a_relay_brings_what_a_joiner_needs(run: Run) -> None:
    # given an anchor and deltas after it
    publish_chain(run, 3)
    origin = run.origin()
    # when a relay joins at the newest version
    run.relay(origin.url)
    # then all that a joiner needs is there, though nobody asked for it
    needed = {c.blake3 for v in range(4) for c in to_rebuild(manifest(run, v))}
    eventually(lambda: held(run) >= needed, "the chain back to the anchor is at the relay")


def test_the_delta_comes_first_then_the_files_then_what_is_older(run: Run) -> None:
    # given a newest version that is an anchor with a delta, and one that is a delta
    publish_chain(run, 1)
    run.publish(2, {**weights(seed=2), "config.json": b"new"}, 1, delta=delta_of(2))
    run.publish(3, weights(seed=2), 2, delta=delta_of(3), whole=False)
    upstream = run.static()
    # when a relay joins
    run.relay(upstream.url)
    newest, anchor = manifest(run, 3), manifest(run, 2)
    parts = [newest.chunks(), {c.blake3: c for c in to_rebuild(anchor)}]
    wanted = parts[0].keys() | parts[1].keys()
    eventually(lambda: held(run) == wanted, "the relay has the newest and its anchor")
    # then the newest came before the anchor, and nothing older at all
    asked = asked_chunks(upstream.paths)
    assert set(asked) == wanted
    assert set(asked[: len(parts[0])]) == parts[0].keys()


def test_a_newer_version_ends_the_transfer_of_the_one_before(run: Run) -> None:
    # given a relay whose upstream gives the chunks of version 0 to nobody
    run.publish(0, weights(30_000))
    old = manifest(run, 0).chunks().keys()
    upstream = run.static()
    for digest in old:
        upstream.answer(digest, silent)
    run.relay(upstream.url)
    eventually(lambda: upstream.asked() >= 1, "version 0 is on its way")
    # when version 1 comes out, then the relay has it while version 0 still hangs
    run.publish(1, {"model.safetensors": weights(seed=1)["model.safetensors"]})
    new = manifest(run, 1).chunks().keys()
    eventually(lambda: held(run) >= new, "version 1 is at the relay")
    assert not held(run) & old
    leftovers = list((run.folder / "relay/demo/chunks").glob(".tmp-*"))
    assert leftovers == [], "the transfers of version 0 have ended"


def test_a_reader_keeps_the_transfer_that_it_waits_for(run: Run) -> None:
    # given a reader that waits for a chunk of version 0, of which bytes are coming
    run.publish(0, {"model.safetensors": weights()["model.safetensors"]})
    (chunk, *_) = manifest(run, 0).chunks()
    upstream = run.static()
    release = threading.Event()
    upstream.answer(chunk, held_until(release))
    relay = run.relay(upstream.url)
    eventually(lambda: upstream.asked(chunk) >= 1, "the chunk is on its way")
    with ThreadPoolExecutor(1) as pool:
        reader = pool.submit(httpx.get, f"{relay.url}/demo/chunks/{chunk}", timeout=30)
        eventually(lambda: waiting_for(relay.url) >= 1, "the reader waits")
        # when version 1 takes over
        run.publish(1, {"model.safetensors": weights(seed=1)["model.safetensors"]})
        new = manifest(run, 1).chunks().keys()
        eventually(lambda: held(run) >= new, "version 1 is at the relay")
        release.set()
        # then the reader gets its chunk all the same
        assert reader.result().status_code == 200


def waiting_for(url: str) -> int:
    """How many connections a relay has open besides the one that asks."""
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    value = next(line for line in lines if line.startswith("runspec_broadcast_connections "))
    return int(float(value.split()[1])) - 1


@pytest.fixture
def short_stall(monkeypatch: pytest.MonkeyPatch) -> None:
    """Readers at a relay wait half a second for the first byte of a chunk."""
    monkeypatch.setattr("broadcast.transfers.STALL_S", 0.5)


@pytest.mark.usefixtures("short_stall")
def test_who_waits_for_a_chunk_of_which_nothing_comes_is_sent_away(run: Run) -> None:
    run.publish(0, weights())
    (chunk, *_) = manifest(run, 0).chunks()
    upstream = run.static()
    upstream.answer("/chunks/", silent)
    relay = run.relay(upstream.url)
    eventually(lambda: upstream.asked() >= 1, "the manifest is at the relay")
    assert httpx.get(f"{relay.url}/demo/chunks/{chunk}", timeout=30).status_code == 404


def test_a_version_that_nobody_has_is_asked_for_once(run: Run) -> None:
    # given a run whose version 0 is gone everywhere
    for version in range(2):
        run.publish(version, weights(seed=version))
    path = run.store / "demo" / "versions" / "0" / "manifest.json"
    path.unlink()
    upstream = run.static()
    relay = run.relay(upstream.url)
    eventually(lambda: held(run) >= manifest(run, 1).chunks().keys(), "version 1 is there")
    # when many ask the relay for it, at once and one after the other
    url = f"{relay.url}/demo/{OLD}"
    with ThreadPoolExecutor(8) as pool:
        codes = list(pool.map(lambda _: httpx.get(url).status_code, range(32)))
    # then the upstream was asked once, or twice where the machine is slow
    assert set(codes) == {404}
    assert upstream.paths.count(f"/demo/{OLD}") <= 2


def test_memory_of_misses_is_bounded_and_short() -> None:
    now = [0.0]
    missed = Recent(3.0, limit=100, clock=lambda: now[0])
    for version in range(10_000):
        missed.note(version)
    assert [version for version in range(10_000) if version in missed] == list(range(9900, 10_000))
    now[0] = 3.0
    assert 9999 not in missed


@pytest.mark.usefixtures("short_stall")
@pytest.mark.timeout(120)
def test_relays_in_a_ring_do_not_wait_for_each_other(run: Run) -> None:
    # given two relays that know the newest manifest, and nobody who has its chunks or version 0
    for version in range(2):
        run.publish(version, weights(seed=version))
    documents = run.folder / "documents"
    for name in ("roles.json", "latest.json", "versions/1/manifest.json"):
        (documents / "demo" / name).parent.mkdir(parents=True, exist_ok=True)
        (documents / "demo" / name).write_bytes((run.store / "demo" / name).read_bytes())
    source = run.static(documents)
    ports = free_port(), free_port()
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    for number, port in enumerate(ports):
        listen = ServerOptions(listen=("127.0.0.1", port))
        run.relay(urls[1 - number], source.url, name=f"relay-{number}", options=listen)
    for url in urls:
        eventually(lambda u=url: ask(f"{u}/demo/versions/1/manifest.json") == 200, "it is known")

    # when both are asked for one of the chunks and for version 0, then the answer is no
    (chunk, *_) = manifest(run, 1).chunks()
    asked = [f"{url}/demo/{path}" for url in urls for path in (f"chunks/{chunk}", OLD)]
    source.paths.clear()
    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(ask, asked * 2)) == {404}
    # and no question went round in the ring (each relay tries a chunk again about once a second)
    assert source.paths.count(f"/demo/{OLD}") <= 6
    assert max(Counter(asked_chunks(source.paths)).values()) <= 60


def ask(url: str) -> int:
    """Status of an answer that must come in time."""
    return httpx.get(url, timeout=30).status_code


def test_bounded_disk_is_never_exceeded_and_the_newest_is_served(run: Run) -> None:
    # given a relay with room for two versions and a bit
    origin = run.origin()
    limit = 18_000
    relay = run.relay(origin.url, max_bytes=limit)
    client = run.client(relay.url)
    # when one version after the other comes out, then each is to be had from it, within the bound
    for version in range(6):
        run.publish(version, weights(seed=version))
        assert client.latest(version - 1, 20) is not None
        path = client.fetch(version, manifest_digest=None, deadline_s=20)
        assert contents(path) == weights(seed=version)
        new = manifest(run, version).chunks().keys()
        eventually(lambda n=new: held(run) >= n, "it is whole")
        assert 0 < size_of(run.folder / "relay" / "demo") <= limit


def test_a_version_under_a_reader_outlives_the_newer_ones(run: Run) -> None:
    # given a client that has begun to read version 0 at a relay that keeps one version
    run.publish(0, weights())
    relay = run.relay(run.origin().url, keep_versions=1)
    eventually(lambda: held(run) >= manifest(run, 0).chunks().keys(), "version 0 is there")
    first, *rest = manifest(run, 0).chunks()
    assert httpx.get(f"{relay.url}/demo/chunks/{first}").status_code == 200
    # when three newer ones come out
    for version in range(1, 4):
        run.publish(version, weights(seed=version))
        new = manifest(run, version).chunks().keys()
        eventually(lambda n=new: held(run) >= n, "the newer one is at the relay")
    # then the rest of version 0 is still to be had
    eventually(lambda: len(held(run)) == 2 * 6 + 1, "those that nobody reads have gone")
    assert {httpx.get(f"{relay.url}/demo/chunks/{c}").status_code for c in rest} == {200}


def test_how_much_of_each_version_is_here_is_measured(run: Run) -> None:
    # given a relay that keeps one version, and of the newest all but what hangs
    run.publish(0, weights())
    upstream = run.static()
    relay = run.relay(upstream.url, keep_versions=1)
    metric = 'runspec_broadcast_version_complete_ratio{run="demo",version="%d"}'

    def metrics() -> dict[str, float]:
        lines = httpx.get(f"{relay.url}/metrics").text.splitlines()
        return {
            key: float(value)
            for key, _, value in (line.rpartition(" ") for line in lines)
            if key.startswith("runspec_broadcast_")
        }

    eventually(lambda: metrics().get(metric % 0) == 1.0, "all of version 0 is here")
    release = threading.Event()
    newer = weights(20_000, seed=1)
    last = digest_bytes(newer["model.safetensors"][-CHUNK_BYTES:])
    upstream.answer(last, held_until(release))
    run.publish(1, newer)
    eventually(lambda: 0.9 < metrics().get(metric % 1, 0.0) < 1.0, "most of version 1 is here")
    behind = 'runspec_broadcast_behind_seconds{run="demo"}'
    assert metrics()[behind] > 0
    release.set()
    eventually(lambda: metrics().get(metric % 1) == 1.0, "all of version 1 is here")
    eventually(lambda: metric % 0 not in metrics(), "version 0 has gone")
    assert metrics()[behind] == 0


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


async def test_two_relays_do_not_share_a_folder(run: Run) -> None:
    # given a relay at work
    run.publish(0, weights())
    relay = run.relay(run.static().url)
    client = run.client(relay.url)
    # when another one is started on its folder, then it says so and touches nothing
    with pytest.raises(UserError, match="relay/demo: another publisher or relay has held"):
        await run_relay(
            run.folder / "relay",
            run=run.name,
            upstreams=["http://127.0.0.1:1"],
            root_public_key=run.root,
            keep_versions=1,
            log=logging.getLogger("second"),
        )
    assert contents(client.fetch(0, manifest_digest=None, deadline_s=10)) == weights()
