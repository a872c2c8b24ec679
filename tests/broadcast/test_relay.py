"""A relay: what it brings, in which order, what it keeps on its disk, and what it leaves be."""

from __future__ import annotations

import errno
import logging
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from broadcast.answers import Recent
from broadcast.manifest import Chunk, ObjectInfo, WeightsManifest, sign_manifest
from broadcast.relay import Transfers, run_relay, to_rebuild
from broadcast.relay_store import RelayStore
from runspec.core.canonical import digest_bytes
from runspec.core.errors import UserError
from runspec.core.signed import SigningKey
from tests.broadcast.conftest import (
    LOG,
    PATIENCE_S,
    Run,
    answer,
    fetched,
    metric,
    newest,
    warnings,
    weights,
)
from tests.broadcast.fake_relay import held_until, not_there, silent
from tests.waiting import eventually

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("patient")]

ONE_FILE = {"model.safetensors": weights()["model.safetensors"]}
OLD = "versions/0/manifest.json"
KEY = SigningKey.generate()
CHUNK = 2000


def delta_of(version: int) -> dict[str, bytes]:
    return {"model.safetensors.delta": b"%08d" % version * 150}


def held(run: Run, folder: str = "relay") -> set[str]:
    return {path.name for path in run.chunks(folder)}


def until_held(run: Run, version: int) -> None:
    wanted = run.manifest(version).chunks().keys()
    eventually(lambda: held(run) >= wanted, f"version {version} is at the relay")


def test_the_delta_comes_first_then_the_files_then_what_a_joiner_needs(run: Run) -> None:
    # given a chain of deltas back to an anchor, older than which there is one more
    run.publish(0, weights(seed=9))
    run.publish(1, {**weights(seed=2), "config.json": b"new"}, delta={})
    run.publish(2, weights(seed=2), 1, delta=delta_of(2), whole=False)
    run.publish(3, weights(seed=2), 2, delta=delta_of(3), whole=False)
    upstream = run.static()
    # when a relay joins, then it brings all that a joiner needs, though nobody asked for it
    run.relay(upstream.url)
    first = run.manifest(3).chunks().keys()
    wanted = {c.blake3 for v in (1, 2, 3) for c in to_rebuild(run.manifest(v))} | first
    eventually(lambda: held(run) == wanted, "the chain back to the anchor is at the relay")
    # and the newest came first, and nothing older than the anchor at all
    asked = [path.rpartition("/")[2] for path in upstream.paths if "/chunks/" in path]
    assert set(asked) == wanted and set(asked[: len(first)]) == first


def test_a_newer_version_ends_the_transfer_of_the_one_before(run: Run) -> None:
    # given a relay whose upstream gives the chunks of version 0 to nobody
    run.publish(0, {"model.safetensors": weights(30_000)["model.safetensors"]})
    old = run.manifest(0).chunks().keys()
    upstream = run.static()
    for digest in old:
        upstream.answer(digest, silent)
    run.relay(upstream.url)
    eventually(lambda: upstream.asked() >= 1, "version 0 is on its way")
    # when version 1 comes out, then the relay has it while version 0 still hangs
    run.publish(1, weights(seed=1))
    until_held(run, 1)
    folder = run.folder / "relay/demo/chunks"
    eventually(lambda: not list(folder.glob(".tmp-*")), "the transfers of version 0 have ended")
    assert held(run) == run.manifest(1).chunks().keys()


def test_a_reader_keeps_the_transfer_that_it_waits_for(run: Run) -> None:
    # given a reader that waits for a chunk of version 0, of which bytes are coming
    run.publish(0, ONE_FILE)
    (chunk, *_) = run.manifest(0).chunks()
    upstream, release = run.static(), threading.Event()
    upstream.answer(chunk, held_until(release))
    relay = run.relay(upstream.url)
    eventually(lambda: upstream.asked(chunk) >= 1, "the chunk is on its way")
    with ThreadPoolExecutor(1) as pool:
        reader = pool.submit(answer, f"{relay.url}/demo/chunks/{chunk}")
        eventually(lambda: metric(relay.url, "connections") > 1, "the reader waits")
        # when version 1 takes over, then the reader gets its chunk all the same
        run.publish(1, {"model.safetensors": weights(seed=1)["model.safetensors"]})
        until_held(run, 1)
        release.set()
        assert reader.result().status_code == 200


def test_chunks_are_passed_on_while_later_ones_are_still_coming(run: Run) -> None:
    run.publish(0, weights())
    plain, release = run.static(), threading.Event()
    first, *_, last = run.weights_chunks()
    plain.answer(last.blake3, held_until(release))
    relay = run.relay(plain.url)
    eventually(lambda: plain.asked() >= 7, "the relay asks for every chunk")
    assert answer(f"{relay.url}/demo/chunks/{first.blake3}").status_code == 200
    release.set()
    assert fetched(run.client(relay.url)) == weights()


def test_what_does_not_come_is_not_waited_for(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("broadcast.relay.STALL_S", 0.2)
    monkeypatch.setattr("broadcast.relay.MISSED_S", PATIENCE_S)
    # given a run whose version 0 is gone everywhere, and the chunks of version 1 are silent
    for version in range(2):
        run.publish(version, weights(seed=version))
    chunk, *_ = run.manifest(1).chunks()
    upstream = run.static()
    upstream.answer("/chunks/", silent)
    upstream.answer(OLD, not_there)
    relay = run.relay(upstream.url)
    eventually(lambda: upstream.asked() >= 1, "the manifest is at the relay")
    # when many ask for both, then the answer is no, and the upstream was asked once
    urls = [f"{relay.url}/demo/{path}" for path in (f"chunks/{chunk}", OLD)] * 8
    with ThreadPoolExecutor(8) as pool:
        assert {got.status_code for got in pool.map(answer, urls)} == {404}
    assert upstream.asked(OLD) == 1


def test_memory_of_misses_is_bounded_and_short() -> None:
    now = [0.0]
    missed = Recent(3.0, limit=100, clock=lambda: now[0])
    for version in range(10_000):
        assert missed.is_new(version)
    assert [version for version in range(10_000) if version in missed] == list(range(9900, 10_000))
    missed.note(9900)
    missed.note(10_000)
    assert 9900 in missed and 9901 not in missed and not missed.is_new(9900)
    now[0] = 3.0
    assert 9999 not in missed


def test_versions_within_bounds_on_the_disk(run: Run) -> None:
    # given a relay with room for two versions and a bit, and one that keeps two versions
    origin, limit = run.origin(), 18_000
    bounded = run.relay(origin.url, name="bounded", max_bytes=limit)
    few = run.relay(origin.url, keep_versions=2)
    client, other = run.client(bounded.url), run.client(few.url, cache="other")
    # when one version after the other comes out, then each is to be had from both
    for version in range(7):
        run.publish(version, weights(seed=version))
        for one in (client, other):
            assert newest(one, version - 1).version == version
            assert fetched(one, version) == weights(seed=version)
        new = run.manifest(version).chunks().keys()
        eventually(lambda n=new: held(run, "bounded") >= n, "it is whole")
        folder = run.folder / "bounded" / "demo"
        paths = [*folder.glob("chunks/*"), *folder.glob("versions/*/*")]
        assert 0 < sum(path.stat().st_size for path in paths) <= limit
    # Six chunks of weights each, and the config that all share. Just read ones stay too: not 0.
    eventually(lambda: len(held(run)) == 4 * 6 + 1, "the oldest versions go")


def test_how_much_of_each_version_is_here_is_measured(run: Run) -> None:
    # given a relay that keeps one version, and of the newest all but what hangs
    run.publish(0, weights())
    upstream, release = run.static(), threading.Event()
    relay = run.relay(upstream.url, keep_versions=1)

    def share(version: int) -> float:
        return metric(relay.url, f'version_complete_ratio{{run="demo",version="{version}"}}')

    eventually(lambda: share(0) == 1.0, "all of version 0 is here")
    newer = weights(20_000, seed=1)
    last = digest_bytes(newer["model.safetensors"][-1000:])
    upstream.answer(last, held_until(release))
    run.publish(1, newer)
    eventually(lambda: 0.9 < share(1) < 1.0, "most of version 1 is here")
    behind = 'behind_seconds{run="demo"}'
    assert metric(relay.url, behind) > 0
    release.set()
    eventually(lambda: share(1) == 1.0, "all of version 1 is here")
    eventually(lambda: share(0) == 0.0, "version 0 has gone")
    assert metric(relay.url, behind) == 0


def test_a_restarted_relay_serves_from_disk_while_the_origin_is_away(run: Run) -> None:
    for version in range(3):
        run.publish(version, weights(seed=version))
    origin = run.origin()
    relay = run.relay(origin.url)
    client = run.client(relay.url)
    # given that it has the newest, and an older one that was asked for
    newest(client)
    assert fetched(client, 1) == weights(seed=1)
    until_held(run, 2)
    relay.stop()
    origin.stop()
    again = run.client(run.relay(origin.url).url, cache="second")
    assert newest(again).version == 2
    for version in (1, 2):
        assert fetched(again, version) == weights(seed=version)


async def test_two_relays_do_not_share_a_folder(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("broadcast.relay._LOCK_DEADLINE_S", 0.1)
    run.publish(0, weights())
    relay = run.relay(run.static().url)
    known = {"upstreams": [relay.url], "root_public_key": run.root, "keep_versions": 1, "log": LOG}
    # when another one is started on its folder, then it says so and touches nothing
    with pytest.raises(UserError, match="relay/demo: another publisher or relay has held"):
        await run_relay(run.folder / "relay", run=run.name, **known)
    with pytest.raises(UserError, match=r"'../x' is not the name of a run"):
        await run_relay(run.folder / "relay", run="../x", **known)
    assert fetched(run.client(relay.url)) == weights()


def test_a_full_disk_is_named_and_goes_on_when_there_is_room(run, monkeypatch, caplog):
    # given a relay on a full disk
    run.publish(0, weights())
    pwrite, full, place = os.pwrite, [True], run.folder / "relay"

    def limited(descriptor: int, data: bytes, at: int) -> int:
        if full[0] and Path(f"/proc/self/fd/{descriptor}").readlink().is_relative_to(place):
            raise OSError(errno.ENOSPC, "No space left on device")
        return pwrite(descriptor, data, at)

    monkeypatch.setattr(os, "pwrite", limited)
    origin = run.origin()
    relay = run.relay(origin.url)
    # when a client asks it and the origin, then the origin makes good what it cannot give
    assert fetched(run.client(relay.url, origin.url)) == weights()
    said = "cannot store a chunk of version 0: No space left on device"
    eventually(lambda: any(said in line for line in warnings(caplog)), "it names its full disk")
    # and once there is room, it serves all of it alone
    full[0] = False
    assert fetched(run.client(relay.url, cache="alone")) == weights()


# -- Its disk, without a network: what goes when something else is to come -------------------------


def body(version: int, number: int) -> bytes:
    return f"{version}.{number}.".encode() * (CHUNK // 4)


def info(version: int, numbers: range) -> ObjectInfo:
    bodies = [body(version, number) for number in numbers]
    chunks = tuple(Chunk(digest_bytes(b), len(b)) for b in bodies)
    return ObjectInfo(sum(c.size for c in chunks), digest_bytes(b"".join(bodies)), chunks)


def whole(version: int, chunks: int = 4) -> WeightsManifest:
    objects = {"w": info(version, range(chunks))}
    return WeightsManifest("demo", version, None, None, {}, ("w",), objects, {})


def delta(version: int, base: int | None = None) -> WeightsManifest:
    small, parts = {"c": info(version, range(1))}, {"w.delta": info(version, range(1, 2))}
    base = version - 1 if base is None else base
    return WeightsManifest("demo", version, base, None, {}, ("w",), small, parts)


def on_disk(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def store_of(folder: Path, max_bytes: int | None, *held: WeightsManifest, keep: int = 5):
    """A relay's store that has taken in these versions."""
    (folder / "demo").mkdir(exist_ok=True)
    log = logging.getLogger("relay_store")
    store = RelayStore(folder, "demo", keep_versions=keep, max_bytes=max_bytes, log=log)
    for manifest in held:
        put(store, manifest)
    return store


def put(store: RelayStore, manifest: WeightsManifest) -> None:
    """Adopts a version and stores its chunks, or as many as there is room for."""
    store.adopt(manifest, sign_manifest(manifest, KEY))
    store.check_fits(manifest.version, manifest.chunks().values())
    bodies = {digest_bytes(b): b for b in (body(manifest.version, n) for n in range(10))}
    for chunk in manifest.chunks().values():
        with store.new_chunk(chunk, manifest.version) as into:
            into.write_bytes(bodies[chunk.blake3])


def test_what_is_being_read_goes_last(tmp_path: Path) -> None:
    store = store_of(tmp_path, 22_000, whole(0), whole(1))
    store.pins.touch(0)
    put(store, whole(2))
    assert set(store.manifests) == {0, 2}
    store.pins.touch(2)
    put(store, whole(3))  # all the others are being read; the newest must come all the same
    assert set(store.manifests) == {2, 3}


def test_no_version_displaces_a_newer_one_or_what_the_newest_needs(tmp_path: Path) -> None:
    store = store_of(tmp_path, 22_000, whole(4), whole(5))
    with pytest.raises(UserError, match="version 2 does not fit"):
        put(store, whole(2))
    assert {4, 5} <= set(store.manifests)
    (tmp_path / "chain").mkdir()
    chain = store_of(tmp_path / "chain", 24_000, whole(1), delta(2), delta(3))
    assert not chain.drop_one(2)
    assert set(chain.manifests) == {1, 2, 3}
    # while of those that it does not need the oldest goes first
    (tmp_path / "base").mkdir()
    deltas = [delta(version, base=0) for version in range(1, 5)]
    assert set(store_of(tmp_path / "base", 21_000, whole(0), *deltas).manifests) == {0, 3, 4}


def test_what_cannot_fit_makes_nothing_go(tmp_path: Path) -> None:
    store = store_of(tmp_path, 12_000, whole(0))
    with pytest.raises(UserError, match=r"version 1 needs 1[0-9],\d{3} bytes here, 12,000 are"):
        put(store, whole(1, chunks=9))
    assert 0 in store.manifests and len(list((tmp_path / "demo/chunks").iterdir())) == 4


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    steps=st.lists(
        st.tuples(st.integers(0, 12), st.booleans(), st.booleans()), min_size=1, max_size=15
    ),
    max_bytes=st.integers(3_000, 40_000),
    keep=st.integers(1, 4),
)
def test_the_bound_holds_whatever_comes(tmp_path_factory, steps, max_bytes, keep):
    folder = tmp_path_factory.mktemp("relay_store")
    store = store_of(folder, max_bytes, keep=keep)
    for version, anchor, read in steps:
        if version not in store.manifests:
            with suppress(UserError):
                put(store, whole(version) if anchor or version == 0 else delta(version))
        if read and version in store.manifests:
            store.pins.touch(version)
        assert on_disk(folder) <= max_bytes
        known = {digest for m in store.manifests.values() for digest in m.chunks()}
        here = {path.name for path in (folder / "demo/chunks").glob("*")}
        assert here <= known, "nothing stays that no version needs"
    again = store_of(folder, max_bytes, keep=keep)
    again.believe({KEY.public_hex})
    assert again.manifests == store.manifests
    # and a smaller bound holds from the start
    smaller = store_of(folder, max_bytes // 2, keep=keep)
    smaller.believe({KEY.public_hex})
    assert on_disk(folder) <= max_bytes // 2
    assert smaller.manifests.items() <= store.manifests.items()


def test_the_data_of_a_run_has_room_before_its_versions(tmp_path: Path) -> None:
    # given a relay with room for two versions and a bit, which are there
    both = on_disk(store_of(tmp_path, None, whole(0), whole(1)).store) + 1000
    data = RelayStore(tmp_path, "demo.data", keep_versions=1, max_bytes=both, log=LOG)
    versions = RelayStore(tmp_path, "demo", keep_versions=5, max_bytes=both, log=LOG, beside=data)
    versions.believe({KEY.public_hex})
    assert set(versions.manifests) == {0, 1}
    # when it knows of data, of which nothing has come yet, then the older version goes
    files = replace(whole(9), run="demo.data")
    (tmp_path / "demo.data").mkdir(exist_ok=True)
    data.adopt(files, sign_manifest(files, KEY))
    versions.trim()
    assert set(versions.manifests) == {1}
    # and the data finds room, and a version that would need it does not
    put(data, files)
    assert on_disk(tmp_path) <= both
    with pytest.raises(UserError, match="are allowed"):
        put(versions, whole(2, chunks=8))


async def test_a_full_disk_lets_the_oldest_go(tmp_path: Path) -> None:
    # given a disk with room for two and a half versions, two of which are there
    store = store_of(tmp_path, None, whole(0), whole(1))
    room, said = on_disk(tmp_path) + 5000, list[str]()
    bodies = {digest_bytes(b): b for b in (body(2, number) for number in range(4))}

    class Disk:
        """Stands in for a fetcher: chunks come, until the disk is full."""

        async def chunk(self, chunk: Chunk, *rest: object, into: Path, attempts: object) -> None:
            if on_disk(tmp_path) + chunk.size > room:
                raise OSError(errno.ENOSPC, "No space left on device")
            into.write_bytes(bodies[chunk.blake3])

    transfers = Transfers(Disk(), store, complain=lambda error: said.append(str(error)))
    store.adopt(whole(2), sign_manifest(whole(2), KEY))
    # when the third comes, then the oldest has gone for it
    await transfers.bring(whole(2).chunks().values())
    assert set(store.manifests) == {1, 2} and not said
    assert all([await store.has(digest) for v in (1, 2) for digest in whole(v).chunks()])
    assert on_disk(tmp_path) <= room
    # and a chunk whose versions went meanwhile does not stay
    (chunk, *_) = whole(1).chunks().values()
    with store.new_chunk(chunk, 1) as into:
        store.keep_versions = 1
        store.prune(2)
        into.write_bytes(body(1, 0))
    assert {path.name for path in (tmp_path / "demo/chunks").iterdir()} == set(whole(2).chunks())
