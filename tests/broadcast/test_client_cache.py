"""The client's folder: what is held, who uses it, what an ended fetch leaves, and how much fits."""

from __future__ import annotations

import asyncio
import logging
import shutil
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from broadcast.disk import Cancellation, in_thread
from broadcast.manifest import (
    MAX_CHUNK_BYTES,
    Chunk,
    ObjectInfo,
    open_manifest,
    read_manifest,
    sign_manifest,
)
from runspec.core.errors import UserError
from runspec.core.hashing import digest_bytes
from tests.waiting import eventually

from .conftest import Run, contents, weights
from .counted import Counted, fetch, hold_chunks, small_files, warnings
from .fake_relay import held_until, honest, only
from .model_versions import ModelVersions


@pytest.fixture
def counted(run: Run) -> Counted:
    return Counted(run)


def test_a_held_version_is_returned_without_a_question(run: Run, counted: Counted) -> None:
    digest = run.publish(0, weights())
    client = run.client(counted.url)
    path = client.fetch(0, manifest_digest=digest, deadline_s=10)
    counted.server.paths.clear()

    assert client.fetch(0, manifest_digest=digest, deadline_s=0) == path
    assert counted.server.paths == []


def test_a_version_held_with_another_manifest_is_replaced(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    # given a cache that was filled by an earlier run of the same name
    run.publish(0, weights(seed=1))
    client = run.client(run.static().url)
    fetch(client, 0)
    old = (run.folder / "cache" / "v0" / "manifest.json").read_bytes()
    (run.folder / "store").rename(run.folder / "old")
    digest = run.publish(0, weights(seed=2))

    path = client.fetch(0, manifest_digest=digest, deadline_s=10)

    assert contents(path) == weights(seed=2)
    assert (path / "manifest.json").read_bytes() != old
    assert any("version 0 is here as" in line for line in warnings(caplog))


def test_another_runs_version_passes_for_none_of_this_run(
    run: Run, other_run: Run, counted: Counted
) -> None:
    # given a folder with another run's version of the same number
    run.publish(0, weights())
    other_run.publish(0, weights(seed=1))
    theirs = fetch(other_run.client(other_run.static().url), 0)
    shutil.copytree(theirs, run.folder / "cache" / "v0")
    # when this run's is fetched there, then it is neither returned nor removed
    with pytest.raises(UserError, match=r"cache/v0: .* of run 'other', not 'demo'"):
        fetch(run.client(counted.url), 0)
    assert contents(run.folder / "cache" / "v0") == weights(seed=1)


@pytest.mark.parametrize("is_file", [True, False])
def test_what_is_no_version_is_not_touched(run: Run, counted: Counted, is_file: bool) -> None:
    run.publish(0, weights())
    client = run.client(counted.url)
    mine = run.folder / "cache" / "v0"
    if is_file:
        mine.write_text("mine")
    else:
        mine.mkdir()

    with pytest.raises(UserError, match=r"cache/v0: exists, and is no version that was fetched"):
        fetch(client, 0)

    assert mine.exists() and counted.moved() == 0


def test_a_base_is_not_pruned_while_it_is_built_on(run: Run, counted: Counted) -> None:
    # given a fetch that waits for its delta
    versions = ModelVersions(run)
    client = run.client(counted.url)
    versions.publish(0)
    fetch(client, 0)
    versions.publish(1, base=0)
    asked, go_on = hold_chunks(counted.server)
    cache = run.folder / "cache"
    with ThreadPoolExecutor(1) as pool:
        fetching = pool.submit(fetch, client, 1)
        assert asked.wait(10)

        # when everything is pruned, then what it builds on and what it makes stay
        client.prune(set())
        assert {p.name for p in cache.iterdir()} >= {"v0", ".partial-v1"}
        go_on.set()
        assert contents(fetching.result()) == versions.files(1)

    # and go once it is done, with what killed processes had begun to remove
    (cache / ".removed-0" / "v7").mkdir(parents=True)
    (cache / ".deltas-v1" / "1").mkdir(parents=True)
    client.prune({1})
    assert {p.name for p in cache.iterdir()} == {"v1", ".lock-v1", "roles.json"}


def test_clients_that_share_a_directory_fetch_a_version_once(run: Run, counted: Counted) -> None:
    run.publish(0, weights())
    clients = [run.client(counted.url) for _ in range(3)]

    with ThreadPoolExecutor(3) as pool:
        paths = list(pool.map(lambda client: fetch(client, 0), clients))

    assert [contents(path) for path in paths] == [weights()] * 3
    assert counted.moved() == sum(len(data) for data in weights().values())


def test_whoever_waits_for_another_fetch_is_told_at_the_deadline(
    run: Run, counted: Counted
) -> None:
    run.publish(0, weights())
    first, second = run.client(counted.url), run.client(counted.url)
    asked, go_on = hold_chunks(counted.server)
    with ThreadPoolExecutor(1) as pool:
        fetching = pool.submit(fetch, first, 0)
        assert asked.wait(10)

        with pytest.raises(UserError, match="version 0 is still being fetched"):
            fetch(second, 0, deadline_s=0.1)

        go_on.set()
        assert contents(fetching.result()) == weights()


def test_a_fetch_that_is_cancelled_goes_on_later(run: Run, counted: Counted) -> None:
    run.publish(0, weights())
    client = run.client(counted.url)
    asked, go_on = hold_chunks(counted.server)
    with ThreadPoolExecutor(1) as pool:
        fetching: Future[Path] = pool.submit(fetch, client, 0)
        assert asked.wait(10)
        client.cancel()
        with pytest.raises(CancelledError):
            fetching.result()
    go_on.set()

    assert not (run.folder / "cache" / "v0").exists()
    assert contents(fetch(client, 0)) == weights()


def test_a_joiner_that_is_overtaken_goes_on_with_the_anchor(run: Run, counted: Counted) -> None:
    # given a joiner that had some of the anchor when its fetch ended
    versions = ModelVersions(run)
    versions.publish(0)
    versions.publish(1, base=0)
    client = run.client(counted.url)
    server, go_on = counted.server, threading.Event()
    server.answer("/chunks/", only(12, honest, then=held_until(go_on)))
    with ThreadPoolExecutor(1) as pool:
        fetching = pool.submit(fetch, client, 1)
        partial = run.folder / "cache" / ".partial-v1" / "model.safetensors"
        eventually(lambda: intact_bytes(run, partial) > 0, "some chunks are on disk")
        client.cancel()
        with pytest.raises(CancelledError):
            fetching.result()
    go_on.set()
    had = intact_bytes(run, partial)

    # when it begins again with a version that has come out since
    versions.publish(2, base=1)
    counted.moved()
    path = fetch(client, 2)

    # then it fetches what it lacks
    assert contents(path) == versions.files(2)
    deltas = versions.delta_bytes(1) + versions.delta_bytes(2)
    total = versions.weights_bytes(0) + deltas + small_files(versions, 2)
    assert counted.moved() == total - had
    assert not partial.exists()


def intact_bytes(run: Run, file: Path) -> int:
    """Bytes of version 0's weights that lie in a file chunk by chunk."""
    manifest = read_manifest(run.store / "demo/versions/0")
    data, at, found = file.read_bytes() if file.exists() else b"", 0, 0
    for chunk in manifest.objects["model.safetensors"].chunks:
        found += chunk.size * (digest_bytes(data[at : at + chunk.size]) == chunk.blake3)
        at += chunk.size
    return found


def test_a_long_fetch_says_how_far_it_is_and_who_sends(
    run: Run,
    counted: Counted,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    run.publish(0, weights())
    monkeypatch.setattr("broadcast.download.EVERY_S", 0.01)
    client = run.client(counted.url)
    server = counted.server
    half = threading.Event()
    server.answer("/chunks/", only(3, honest, then=held_until(half)))

    with caplog.at_level(logging.INFO), ThreadPoolExecutor(1) as pool:
        fetching = pool.submit(fetch, client, 0)

        def reported(form: str) -> Callable[[], bool]:
            return lambda: any(form in r.getMessage() for r in caplog.records)

        eventually(reported(f"from {server.url} 100%"), "the server is named")
        eventually(reported("from no server just now"), "it says that nothing comes")
        half.set()
        fetching.result()

    lines = [r.getMessage() for r in caplog.records if " MB/s" in r.getMessage()]
    assert all(line.startswith("version 0: 0.0 of 0.0 MB, ") for line in lines)


def test_a_disk_without_room_is_said_before_anything_is_fetched(run: Run, counted: Counted) -> None:
    # given a version of 1 TB more than this disk has free
    chunk = Chunk("0" * 64, MAX_CHUNK_BYTES)
    count = (shutil.disk_usage(run.folder).free + 10**12) // chunk.size
    huge = ObjectInfo(count * chunk.size, "0" * 64, (chunk,) * count)
    run.publish(0, weights())
    stored = run.store / "demo" / "versions" / "0" / "manifest.json"
    manifest = open_manifest(stored.read_bytes(), run="demo", publishers=None)
    stored.write_bytes(sign_manifest(replace(manifest, objects={"model.bin": huge}), run.key))

    # when it is fetched, then what is missing is said and nothing was asked for
    with pytest.raises(UserError, match=r"which has .* GB free: (9\d\d|1,?0\d\d)\.\d{3} GB are"):
        fetch(run.client(counted.url), 0)
    assert counted.moved() == 0
    assert not (run.folder / "cache" / "v0").exists()


# -- Disk work beside an event loop: it can be ended, and is waited for ----------------------------


def forever() -> Cancellation:
    return Cancellation(time.monotonic() + 60)


async def test_cancelled_work_is_ended_and_waited_for() -> None:
    # given work in a thread that looks at its cancellation now and then
    cancellation, working, look = forever(), threading.Event(), threading.Event()
    ended: list[str] = []

    def work() -> None:
        working.set()
        look.wait(20)
        try:
            cancellation.check("working", Path("here"))
        except UserError as error:
            ended.append(str(error))

    running = asyncio.create_task(in_thread(work, cancellation))
    await asyncio.to_thread(working.wait, 20)

    # when it is cancelled, twice, then nobody is told so before the thread is done
    for _ in range(2):
        running.cancel()
        assert not (await asyncio.wait([running], timeout=0.01))[0]
    look.set()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert len(ended) == 1 and "here: the time was up while working" in ended[0]
