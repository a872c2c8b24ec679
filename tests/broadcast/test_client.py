"""The client: ways to a version, its folder, and what an ended fetch leaves there."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

import bridge.delta
from broadcast.assemble import delta_applier
from broadcast.client import WeightsClient
from broadcast.disk import Cache, Cancellation, in_thread
from broadcast.manifest import MAX_CHUNK_BYTES, Chunk, ObjectInfo, WeightsManifest, sign_manifest
from runspec.core.canonical import digest_bytes
from runspec.core.errors import UserError
from runspec.core.signed import SigningKey
from tests.broadcast.conftest import (
    PATIENCE_S,
    ModelVersions,
    Run,
    contents,
    fetch,
    fetched,
    flip_a_bit,
    hold_chunks,
    intact,
    not_fetched,
    refused,
    warnings,
    weights,
)
from tests.broadcast.fake_relay import held_until, honest, not_there, only, silent
from tests.waiting import eventually

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("patient")]

SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
KEY = SigningKey.generate()


class Counted:
    """Versions of a model, and a plain server of them that knows what it has sent."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self.versions = ModelVersions(run)
        self.server = run.static()
        self.url = self.server.url

    def chain(self, length: int) -> None:
        """Version 0, whole, and so many deltas, each on the one before."""
        self.versions.publish(0)
        for version in range(1, length + 1):
            self.versions.publish(version, base=version - 1)

    def moved(self) -> int:
        """Bytes of chunks asked for since the last call."""
        chunks = [path for path in self.server.paths if "/chunks/" in path]
        self.server.paths.clear()
        return sum((self._run.store / path.lstrip("/")).stat().st_size for path in chunks)

    def size(self, version: int, *deltas: int) -> int:
        """Of the files of a version that hold no tensors, and of some deltas."""
        whole = sum(map(len, self.versions.files(version).values()))
        small = whole - self.versions.weights_bytes(version)
        return small + sum(map(self.versions.delta_bytes, deltas))


@pytest.fixture
def counted(run: Run) -> Counted:
    return Counted(run)


# -- Ways to a version: the files of an anchor, deltas on what is here, or both --------------------


def test_each_moves_what_it_lacks(run: Run, counted: Counted) -> None:
    # given a follower with version 0 in shards, a delta, an anchor that is also a delta, and a
    # delta on it
    counted.versions = versions = ModelVersions(run, files=SHARDS)
    follower = run.client(counted.url)
    versions.publish(0)
    fetch(follower, 0)
    versions.publish(1, base=0)
    versions.publish(2, base=1, anchor=True)
    counted.moved()
    # when it follows, then it moves the delta, and of the small files those that changed
    assert fetched(follower, 1) == versions.files(1)
    same = ("config.json", "model.safetensors.index.json")
    unchanged = sum(len(versions.files(1)[name]) for name in same)
    assert counted.moved() == counted.size(1, 1) - unchanged
    assert contents(run.folder / "cache" / "v0") == versions.files(0)  # untouched
    assert fetched(follower, 2) == versions.files(2)
    assert counted.moved() == counted.size(2, 2) - unchanged
    # and a joiner starts from the newest anchor, and asks for no older manifest
    versions.publish(3, base=2)
    assert fetched(run.client(counted.url, cache="joiner"), 3) == versions.files(3)
    manifests = [p for p in counted.server.paths if p.endswith("manifest.json")]
    assert manifests == [f"/demo/versions/{version}/manifest.json" for version in (3, 2)]
    assert counted.moved() == versions.weights_bytes(2) + counted.size(3, 3)
    assert list((run.folder / "joiner").glob(".[pd]*")) == []


def test_a_damaged_base_is_named_and_fetched_anew(run, counted, caplog):
    # given a held version with a bit flipped where no delta overwrites it
    versions, client = counted.versions, run.client(counted.url)
    counted.chain(1)
    held = fetch(client, 1)
    versions.publish(2, base=1)
    flip_a_bit(held / "model.safetensors")
    counted.moved()
    # when the next version is fetched, then it is right, by way of the anchor, and the log says why
    assert fetched(client, 2) == versions.files(2)
    assert counted.moved() > versions.weights_bytes(0)
    (said,) = warnings(caplog)
    assert str(held) in said and "tensor b" in said and "fetching an anchor" in said
    # and the damaged one is not built on again, though it would do for a version after it
    versions.publish(3, base=1)
    assert fetched(client, 3) == versions.files(3)
    assert len(warnings(caplog)) == 1
    # until it is asked for: then it is fetched anew, and built on
    assert fetched(client, 1) == versions.files(1)
    versions.publish(4, base=1)
    counted.moved()
    assert fetched(client, 4) == versions.files(4)
    assert counted.moved() < versions.weights_bytes(0)


@pytest.mark.parametrize("anchor", [True, False])
def test_a_bad_delta_makes_no_version(run, counted, anchor, caplog):
    # given a publisher whose delta is from a version that was never published
    versions, client = counted.versions, run.client(counted.url)
    versions.publish(0)
    fetch(client, 0)
    versions.write(99)
    versions.publish(1, base=0, anchor=anchor, delta_from=99)
    # when it is fetched, then an anchor is whole all the same, and without one there is nothing
    if anchor:
        assert fetched(client, 1) == versions.files(1)
    else:
        with pytest.raises(UserError, match="does not become version 1"):
            fetch(client, 1)
        assert not (run.folder / "cache" / "v1").exists()
    assert any("cache/v0: with deltas 1 does not become version 1" in w for w in warnings(caplog))


@pytest.mark.parametrize("missing", ["manifest", "chunk"])
def test_a_missing_link_is_found_elsewhere_or_named(run, counted, missing):
    # given a server that has lost version 1, on which version 2 is built
    counted.chain(2)
    chunk = run.manifest(1).delta["model.safetensors.delta"].chunks[0].blake3
    lost, said = (
        ("versions/1/", ["needs version 1, which no server has"])
        if missing == "manifest"
        else (chunk, [chunk[:16], counted.url])
    )
    counted.server.answer(lost, not_there)
    # when a joiner fetches version 2 from it alone, then it is told what is missing, and where
    not_fetched(run.client(counted.url, cache="alone"), *said, version=2)
    assert not (run.folder / "alone" / "v2").exists()
    # and with a second server, it has it
    both = run.client(counted.url, run.static().url)
    assert fetched(both, 2) == counted.versions.files(2)


@pytest.mark.parametrize("joiner", [True, False])
@pytest.mark.parametrize("damaged", [True, False])
def test_a_client_that_ends_while_it_applies_deltas_goes_on_from_there(
    run: Run,
    counted: Counted,
    joiner: bool,
    damaged: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    # given a client that ended with the files of version 0 half turned into version 2
    counted.chain(2)
    versions, cache = counted.versions, run.folder / "cache"
    client = run.client(counted.url)
    if not joiner:
        fetch(client, 0)

    def ends_in_the_middle(directory: Path, deltas: Sequence[Path], tensors: dict) -> None:
        file = directory / "model.safetensors"
        before = file.read_bytes()
        bridge.delta.apply_deltas(directory, deltas, tensors)
        half = len(before) // 2
        file.write_bytes(file.read_bytes()[:half] + before[half:])
        raise RuntimeError("ends here")

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="ends here"):
        patch.setattr("broadcast.client.delta_applier", lambda: ends_in_the_middle)
        fetch(client, 2)
    left = cache / ".partial-v2" / "model.safetensors"
    assert left.read_bytes() != versions.files(2)["model.safetensors"]
    if damaged:
        left.write_bytes(left.read_bytes()[:-1] + b"?")
    counted.moved()
    # when it starts again, then nothing comes again, but the files that turned out to be wrong
    assert fetched(run.client(counted.url), 2) == versions.files(2)
    came = counted.moved()
    assert came == (0 if not damaged else versions.weights_bytes(0) * joiner)
    assert any("what a killed fetch left" in line for line in warnings(caplog)) == damaged
    assert joiner or contents(cache / "v0") == versions.files(0)
    assert list(cache.glob(".[pd]*")) == []


def test_what_applies_deltas_may_be_missing() -> None:
    with pytest.raises(UserError, match=r"pip install .*whl\[bridge\]"):
        delta_applier("runspec.nobody")


# -- The folder: who uses it, what an ended fetch leaves, how much fits ----------------------------


def test_a_held_version_is_returned_unless_its_manifest_is_another(run, counted, caplog):
    digest, client = run.publish(0, weights(seed=1)), run.client(counted.url)
    path = fetch(client, 0, digest)
    counted.server.paths.clear()
    assert client.fetch(0, manifest_digest=digest, deadline_s=0) == path
    assert counted.server.paths == []
    # given a run of the same name that begins anew
    shutil.rmtree(run.store)
    digest = run.publish(0, weights(seed=2))
    assert fetched(client, 0, digest) == weights(seed=2)
    assert any("version 0 is here as" in line for line in warnings(caplog))


@pytest.mark.parametrize("kind", ["file", "folder", "another run's"])
def test_what_is_no_version_is_not_touched(run, counted, kind, tmp_path):
    run.publish(0, weights())
    client, mine = run.client(counted.url), run.folder / "cache" / "v0"
    match kind:
        case "file":
            mine.write_text("mine")
        case "folder":
            mine.mkdir()
        case _:
            with ExitStack() as stack:
                other = Run(tmp_path / "other", stack, name="other")
                other.publish(0, weights(seed=1))
                shutil.copytree(fetch(other.client(other.static().url)), mine)
    with pytest.raises(UserError, match=r"cache/v0: exists, and is no version that was fetched"):
        fetch(client)
    assert mine.exists() and counted.moved() == 0


@contextmanager
def fetching(client: WeightsClient, version: int, counted: Counted) -> Iterator[list[Path]]:
    """A fetch whose chunks come after the block; then its result is in the list."""
    asked, go_on = hold_chunks(counted.server)
    done: list[Path] = []
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(fetch, client, version)
        assert asked.wait(PATIENCE_S)
        try:
            yield done
        finally:
            go_on.set()
        done.append(future.result())


def test_a_base_is_not_pruned_while_it_is_built_on(run: Run, counted: Counted) -> None:
    versions, client, cache = counted.versions, run.client(counted.url), run.folder / "cache"
    versions.publish(0)
    fetch(client, 0)
    versions.publish(1, base=0)
    with fetching(client, 1, counted) as made:
        client.prune(set())
        assert {p.name for p in cache.iterdir()} >= {"v0", ".partial-v1"}
    assert contents(made[0]) == versions.files(1)
    # and goes once it is done, with what killed processes had begun to remove
    (cache / ".removed-0" / "v7").mkdir(parents=True)
    (cache / ".deltas-v1" / "1").mkdir(parents=True)
    client.prune({1})
    assert {p.name for p in cache.iterdir()} == {"v1", ".lock-v1", "roles.json"}


def test_clients_that_share_a_directory_fetch_a_version_once(run: Run, counted: Counted) -> None:
    run.publish(0, weights())
    clients = [run.client(counted.url) for _ in range(3)]
    # whoever waits for another's fetch is told at its deadline
    with fetching(clients[0], 0, counted):
        refused(
            lambda s: clients[1].fetch(0, manifest_digest=None, deadline_s=s / 2),
            "version 0 is still being fetched",
        )
    shutil.rmtree(run.folder / "cache" / "v0")
    counted.moved()
    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(fetched, clients)) == [weights()] * 3
    assert counted.moved() == sum(map(len, weights().values()))


def test_a_joiner_that_is_overtaken_goes_on_with_the_anchor(run: Run, counted: Counted) -> None:
    # given a joiner that had some of the anchor when its fetch was cancelled
    counted.chain(1)
    versions, client = counted.versions, run.client(counted.url)
    counted.server.answer("/chunks/", only(12, honest, then=silent))
    file = run.folder / "cache" / ".partial-v1" / "model.safetensors"
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(fetch, client, 1)
        eventually(lambda: intact(run, file), "some chunks are on disk")
        client.cancel()
        with pytest.raises(CancelledError):
            future.result()
    had = sum(intact(run, file).values())
    # when it begins again with a version that has come out since, then it fetches what it lacks
    versions.publish(2, base=1)
    counted.server = run.static()  # a request that was cancelled may still come to the other one
    assert fetched(run.client(counted.server.url), 2) == versions.files(2)
    assert counted.moved() == versions.weights_bytes(0) + counted.size(2, 1, 2) - had
    assert not file.exists()


def test_a_long_fetch_says_how_far_it_is_and_who_sends(run, counted, monkeypatch, caplog):
    run.publish(0, weights())
    monkeypatch.setattr("broadcast.client.EVERY_S", 0.01)
    half = threading.Event()
    counted.server.answer("/chunks/", only(3, honest, then=held_until(half)))
    with caplog.at_level(logging.INFO), ThreadPoolExecutor(1) as pool:
        future = pool.submit(fetch, run.client(counted.url))
        for part in (f"from {counted.url} 100%", "from no server just now"):
            eventually(lambda part=part: part in caplog.text, "it says who sends")
        half.set()
        future.result()
    lines = [line for line in caplog.messages if " MB/s" in line]
    assert all(line.startswith("version 0: 0.0 of 0.0 MB, ") for line in lines)


def test_a_disk_without_room_is_said(run, counted, monkeypatch):
    # given a disk that becomes full: then place and reason are named, and the next fetch resumes
    run.publish(0, weights())
    client, pwrite, full = run.client(counted.url), os.pwrite, [True]

    def limited(descriptor: int, data: bytes, at: int) -> int:
        if full[0] and at >= 3000:
            raise OSError(28, "No space left on device")
        return pwrite(descriptor, data, at)

    monkeypatch.setattr(os, "pwrite", limited)
    with pytest.raises(UserError, match=r"\.partial-v0: cannot write version 0: No space left"):
        fetch(client)
    assert not (run.folder / "cache" / "v0").exists()
    full[0] = False
    assert fetched(client) == weights()
    # given a version of 1 TB more than the disk has free: then nothing is asked for
    chunk = Chunk("0" * 64, MAX_CHUNK_BYTES)
    count = (shutil.disk_usage(run.folder).free + 10**12) // chunk.size
    huge = ObjectInfo(count * chunk.size, "0" * 64, (chunk,) * count)
    stored = run.path("versions/0/manifest.json")
    stored.write_bytes(sign_manifest(replace(run.manifest(0), objects={"m.bin": huge}), run.key))
    counted.moved()
    with pytest.raises(UserError, match=r"which has .* GB free: (9\d\d|1,?0\d\d)\.\d{3} GB are"):
        fetch(run.client(counted.url, cache="small"))
    assert counted.moved() == 0


async def test_cancelled_disk_work_is_ended_and_waited_for() -> None:
    # given work in a thread that looks at its cancellation now and then
    cancellation = Cancellation(time.monotonic() + PATIENCE_S)
    working, look, ended = threading.Event(), threading.Event(), threading.Event()

    def work() -> None:
        working.set()
        look.wait(PATIENCE_S)
        with pytest.raises(UserError, match="here: the time was up while working"):
            cancellation.check("working", Path("here"))
        ended.set()

    running = asyncio.create_task(in_thread(work, cancellation))
    await asyncio.to_thread(working.wait, PATIENCE_S)
    # when it is cancelled, twice, then nobody is told so before the thread is done
    for _ in range(2):
        running.cancel()
        assert not (await asyncio.wait([running], timeout=0.01))[0]
    look.set()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert ended.is_set()


# -- The cache, by any order of what its users do --------------------------------------------------


def signed(version: int, run: str = "demo") -> bytes:
    whole = {"w": ObjectInfo(1, "0" * 64, (Chunk("0" * 64, 1),))}
    return sign_manifest(WeightsManifest(run, version, None, None, {}, (), whole, {}), KEY)


VERSIONS = st.integers(0, 3)
PARTS = ("v", ".partial-v", ".deltas-v", ".lock-v")


class CacheUsers(RuleBasedStateMachine):
    """Two users of a folder: one makes, holds and prunes versions, the other reads them."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(self.root, uuid.uuid4().hex)
        self.cache, self.other = (Cache(self.folder, run="demo") for _ in range(2))
        self.there: dict[str, set[int]] = {part: set() for part in PARTS}
        self.reading = ExitStack()
        self.held: set[int] = set()
        self.holds: dict[Cache, set[int]] = {self.cache: set(), self.other: set()}
        self.foreign: set[int] = set()

    def teardown(self) -> None:
        self.reading.close()
        for cache in self.holds:
            cache.close()

    @property
    def in_use(self) -> set[int]:
        return self.held.union(*self.holds.values())

    @rule(version=VERSIONS, ours=st.booleans())
    def hold(self, version: int, ours: bool) -> None:
        cache = self.cache if ours else self.other
        assert cache.hold(version)
        self.holds[cache].add(version)
        self.there[".lock-v"].add(version)

    @rule(version=VERSIONS)
    def release(self, version: int) -> None:
        self.other.release(version)
        self.holds[self.other].discard(version)

    @rule(version=VERSIONS, part=st.sampled_from([".partial-v", ".deltas-v"]))
    def leave(self, version: int, part: str) -> None:
        """A fetch that was killed left something."""
        (self.folder / f"{part}{version}").mkdir(exist_ok=True)
        self.there[part].add(version)

    @rule(version=VERSIONS, ours=st.booleans())
    def finish(self, version: int, ours: bool) -> None:
        whole = self.cache.whole(version)
        with self.cache.locked(version) as mine:
            assert mine == (version not in self.in_use)
            if mine and not whole.exists():
                whole.mkdir()
                data = signed(version, "demo" if ours else "other")
                (whole / "manifest.json").write_bytes(data)
                self.there["v"].add(version)
                self.foreign -= {version}
                self.foreign |= set() if ours else {version}
        self.there[".lock-v"].add(version)

    @rule()
    def read(self) -> None:
        self.reading.close()
        found = self.reading.enter_context(self.other.reading())
        self.held = set(self.there["v"])
        self.there[".lock-v"] |= self.held
        assert found.keys() == self.held - self.foreign
        assert all(manifest.version == version for version, manifest in found.items())

    @rule()
    def stop_reading(self) -> None:
        self.reading.close()
        self.held = set()

    @rule(version=VERSIONS)
    def remove(self, version: int) -> None:
        if version in self.in_use:
            return
        self.cache.remove(version)
        for part in ("v", ".partial-v", ".deltas-v"):
            self.there[part].discard(version)
        self.swept()

    @rule(keep=st.sets(VERSIONS))
    def prune(self, keep: set[int]) -> None:
        self.cache.prune(keep)
        self.swept()
        self.holds[self.cache] &= keep
        for found in self.there.values():
            found &= keep | self.in_use

    def swept(self) -> None:
        """Deltas of a finished version are of no more use."""
        self.there[".deltas-v"] -= self.there["v"]

    @invariant()
    def the_folder_is_as_expected(self) -> None:
        expected = {f"{part}{number}" for part, found in self.there.items() for number in found}
        assert {path.name for path in self.folder.iterdir()} == expected
        assert self.cache.unfinished() == sorted(self.there[".partial-v"])
        for version in range(4):
            if version not in self.there["v"]:
                assert self.cache.digest(version) is None
            elif version in self.foreign:
                with pytest.raises(UserError, match="is no version that was fetched"):
                    self.cache.digest(version)
            else:
                assert self.cache.digest(version) == digest_bytes(signed(version))


def test_a_cache_is_as_its_users_left_it(tmp_path: Path) -> None:
    CacheUsers.root = tmp_path
    case = CacheUsers.TestCase()
    case.settings = settings(
        max_examples=40, stateful_step_count=25, derandomize=True, deadline=None
    )
    case.runTest()


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"file/cache: cannot write: Not a directory"):
        Cache(tmp_path / "file" / "cache", run="demo")
