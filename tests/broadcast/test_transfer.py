"""Versions travel from publisher to client, directly, through relays, and from plain servers."""

from __future__ import annotations

import asyncio
import json
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import httpx
import pytest

from broadcast.manifest import read_manifest
from broadcast.relay import run_relay
from broadcast.store import prune, publish
from runspec.core.errors import UserError
from tests.waiting import eventually

from .conftest import LOG, Run, contents, weights


def test_a_version_arrives_through_a_relay(run: Run) -> None:
    digest = run.publish(0, weights())
    relay = run.relay(run.origin().url)
    client = run.client(relay.url)

    latest = client.latest(None, 10)
    assert latest is not None and (latest.version, latest.manifest_digest) == (0, digest)
    path = client.fetch(0, manifest_digest=digest, deadline_s=10)

    assert path == run.folder / "cache" / "v0"
    assert contents(path) == weights()
    assert read_manifest(path).version == 0
    assert client.fetch(0, manifest_digest=digest, deadline_s=0) == path  # there already


def test_tensor_digests_travel_in_the_manifest(run: Run, tmp_path: Path) -> None:
    record = {"dtype": "float32", "shape": [2], "blake3": "0" * 64}
    said = {"model_digest": "1" * 64, "tensors": {"w": record}, "files": ["model.safetensors"]}
    run.publish(0, weights() | {"tensors.json": json.dumps(said).encode()})

    path = run.client(run.origin().url).fetch(0, manifest_digest=None, deadline_s=10)

    manifest = read_manifest(path)
    assert (manifest.model_digest, manifest.tensors) == ("1" * 64, {"w": record})
    assert contents(path) == weights()


def test_an_announcement_reaches_a_waiting_client_at_once(run: Run) -> None:
    run.publish(0, weights())
    relay = run.relay(run.origin().url)
    client = run.client(relay.url)
    client.fetch(0, manifest_digest=None, deadline_s=10)
    with ThreadPoolExecutor(1) as waiting:
        answer = waiting.submit(client.latest, 0, 10.0)
        run.publish(1, weights(seed=1))
        published = time.monotonic()
        latest = answer.result()
    assert latest is not None and latest.version == 1
    client.fetch(1, manifest_digest=latest.manifest_digest, deadline_s=10)

    # Milliseconds in truth; the bound tells long polls from a poll every few seconds.
    assert time.monotonic() - published < 2


def test_nothing_new_is_none_after_the_wait(run: Run) -> None:
    run.publish(0, weights())
    client = run.client(run.relay(run.origin().url).url)
    assert client.latest(None, 10) is not None

    started = time.monotonic()
    assert client.latest(0, 0.5) is None
    assert 0.4 < time.monotonic() - started < 3


def test_a_plain_file_server_can_stand_in(run: Run) -> None:
    run.publish(0, weights())
    plain = run.static()
    relay = run.relay(plain.url)

    assert (
        contents(run.client(plain.url).fetch(0, manifest_digest=None, deadline_s=10)) == weights()
    )
    through = run.client(relay.url, cache="through").fetch(0, manifest_digest=None, deadline_s=10)
    assert contents(through) == weights()


def test_a_plain_file_servers_news_arrive(run: Run) -> None:
    run.publish(0, weights())
    client = run.client(run.static().url)
    assert client.latest(None, 10) is not None

    run.publish(1, weights(seed=1))

    latest = client.latest(0, 10)
    assert latest is not None and latest.version == 1


def test_unchanged_files_are_not_fetched_again(run: Run) -> None:
    run.publish(0, weights())
    run.publish(1, {**weights(seed=1), "config.json": b"{}"})
    plain = run.static()
    client = run.client(plain.url)
    client.fetch(0, manifest_digest=None, deadline_s=10)
    asked = plain.chunk_requests()

    path = client.fetch(1, manifest_digest=None, deadline_s=10)

    assert contents(path) == weights(seed=1)
    assert plain.chunk_requests() - asked == 6  # the weights' chunks; config.json came from v0


def test_two_threads_that_want_one_version_fetch_it_once(run: Run) -> None:
    run.publish(0, weights())
    server = run.static()
    client = run.client(server.url)

    with ThreadPoolExecutor(4) as pool:
        fetch = partial(client.fetch, 0, manifest_digest=None, deadline_s=10)
        paths = [future.result() for future in [pool.submit(fetch) for _ in range(4)]]

    assert [contents(path) for path in paths] == [weights()] * 4
    assert server.chunk_requests() == len(run.chunks())


def test_a_relay_passes_chunks_on_while_later_ones_are_still_coming(run: Run) -> None:
    run.publish(0, weights())
    plain = run.static()
    release = threading.Event()
    last = last_chunk(run)
    plain.before = lambda path: release.wait(20) if path.endswith(last) else None  # type: ignore[assignment]
    relay = run.relay(plain.url)
    try:
        eventually(lambda: plain.chunk_requests() >= 7, "the relay asks for every chunk")
        early = httpx.get(f"{relay.url}/demo/chunks/{first_chunk(run)}")
        assert early.status_code == 200 and len(early.content) == 1000
    finally:
        release.set()

    path = run.client(relay.url).fetch(0, manifest_digest=None, deadline_s=10)
    assert contents(path) == weights()


def test_a_relay_fetches_an_older_version_when_it_is_asked_for(run: Run) -> None:
    for version in range(3):
        run.publish(version, weights(seed=version))
    relay = run.relay(run.origin().url)
    client = run.client(relay.url)
    assert client.latest(None, 10) is not None

    assert contents(client.fetch(1, manifest_digest=None, deadline_s=10)) == weights(seed=1)


def test_a_restarted_relay_serves_from_disk_while_the_origin_is_away(run: Run) -> None:
    run.publish(0, weights())
    origin = run.origin()
    relay = run.relay(origin.url)
    run.client(relay.url).fetch(0, manifest_digest=None, deadline_s=10)
    relay.stop()
    origin.stop()

    again = run.relay(origin.url)
    client = run.client(again.url, cache="second")

    latest = client.latest(None, 10)
    assert latest is not None and latest.version == 0
    assert contents(client.fetch(0, manifest_digest=None, deadline_s=10)) == weights()


def test_the_origin_may_go_and_come_back(run: Run) -> None:
    run.publish(0, weights())
    origin = run.origin()
    client = run.client(run.relay(origin.url).url)
    assert client.latest(None, 10) is not None
    origin.stop()
    run.publish(1, weights(seed=1))

    run.origin(port=origin.port)

    latest = client.latest(0, 20)
    assert latest is not None and latest.version == 1
    assert contents(client.fetch(1, manifest_digest=None, deadline_s=10)) == weights(seed=1)


def test_a_server_that_is_down_is_passed_over(run: Run) -> None:
    run.publish(0, weights())
    gone = run.origin()
    gone.stop()
    client = run.client(gone.url, run.origin().url)

    assert client.latest(None, 10) is not None
    assert contents(client.fetch(0, manifest_digest=None, deadline_s=10)) == weights()


@pytest.mark.parametrize("keep_versions", [2, 5])
def test_a_relay_keeps_the_newest_versions_only(run: Run, keep_versions: int) -> None:
    origin = run.origin()
    run.publish(0, weights())
    relay = run.relay(origin.url, keep_versions=keep_versions)
    client = run.client(relay.url)
    for version in range(1, 8):
        run.publish(version, weights(seed=version))
        assert client.latest(version - 1, 10) is not None
        client.fetch(version, manifest_digest=None, deadline_s=10)

    # Six chunks of weights each, and the config that all share. Just read ones stay too: not 0.
    left = min(7, keep_versions * 2) * 6 + 1
    eventually(lambda: len(run.chunks("relay")) == left, "the oldest versions go")
    client.prune({7})
    assert [p.name for p in (run.folder / "cache").glob("v*")] == ["v7"]


def test_a_relay_that_would_keep_nothing_does_not_start(run: Run) -> None:
    relay = run_relay(
        run.folder / "relay",
        run=run.name,
        upstreams=["http://127.0.0.1:1"],
        root_public_key=run.root,
        keep_versions=0,
        host="127.0.0.1",
        port=0,
        log=LOG,
    )
    with pytest.raises(UserError, match="--keep-versions 0: at least 1"):
        asyncio.run(relay)


def test_published_once(run: Run, tmp_path: Path) -> None:
    digest = run.publish(0, weights())
    assert run.publish(0, weights()) == digest

    with pytest.raises(UserError, match="version 0 is published already"):
        run.publish(0, weights(seed=1))

    path = run.client(run.origin().url).fetch(0, manifest_digest=digest, deadline_s=10)
    assert contents(path) == weights()


def test_published_once_even_when_pruned(run: Run) -> None:
    # given versions of which the oldest is pruned
    for version in range(3):
        run.publish(version, weights(seed=version))
    prune(run.store, run="demo", keep_versions=2)
    stored = run.chunks()

    # when its number is published again, with the same contents or others, then it is refused
    for seed in (0, 9):
        with pytest.raises(UserError, match=r"version 0 is gone.* the newest is 2"):
            run.publish(0, weights(seed=seed))

    # and nothing of it is stored, while one that is still there may be published again
    assert run.chunks() == stored
    run.publish(1, weights(seed=1))


def test_only_a_named_publisher_publishes(run: Run, other_run: Run, tmp_path: Path) -> None:
    directory = tmp_path / "files"
    directory.mkdir()
    (directory / "x").write_bytes(b"x")

    with pytest.raises(UserError, match="does not name"):
        publish(run.store, directory, run="demo", version=0, key=other_run.key, roles=run.roles)

    shutil.rmtree(directory)
    with pytest.raises(UserError, match="not a directory"):
        publish(run.store, directory, run="demo", version=0, key=run.key, roles=run.roles)


def first_chunk(run: Run) -> str:
    return _weights_chunks(run)[0]


def last_chunk(run: Run) -> str:
    return _weights_chunks(run)[-1]


def _weights_chunks(run: Run) -> list[str]:
    manifest = read_manifest(run.store / "demo" / "versions" / "0")
    return [chunk.blake3 for chunk in manifest.objects["model.safetensors"].chunks]
