"""Versions travel from publisher to client, directly, through relays, and from plain servers."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from broadcast.manifest import read_manifest
from broadcast.store import prune
from runspec.core.errors import UserError
from tests.waiting import eventually

from .conftest import Run, contents, weights
from .fake_relay import held_until


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


def test_a_plain_file_server_can_stand_in(run: Run) -> None:
    run.publish(0, weights())
    plain = run.static()
    relay = run.relay(plain.url)

    assert (
        contents(run.client(plain.url).fetch(0, manifest_digest=None, deadline_s=10)) == weights()
    )
    through = run.client(relay.url, cache="through").fetch(0, manifest_digest=None, deadline_s=10)
    assert contents(through) == weights()


def test_a_relay_passes_chunks_on_while_later_ones_are_still_coming(run: Run) -> None:
    run.publish(0, weights())
    plain = run.static()
    release = threading.Event()
    last = last_chunk(run)
    plain.answer(last, held_until(release))
    relay = run.relay(plain.url)
    eventually(lambda: plain.asked() >= 7, "the relay asks for every chunk")
    early = httpx.get(f"{relay.url}/demo/chunks/{first_chunk(run)}")
    assert early.status_code == 200 and len(early.content) == 1000
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


def test_a_relay_keeps_the_newest_versions_only(run: Run) -> None:
    origin = run.origin()
    run.publish(0, weights())
    relay = run.relay(origin.url, keep_versions=2)
    client = run.client(relay.url)
    for version in range(1, 8):
        run.publish(version, weights(seed=version))
        assert client.latest(version - 1, 10) is not None
        client.fetch(version, manifest_digest=None, deadline_s=10)

    # Six chunks of weights each, and the config that all share. Just read ones stay too: not 0.
    eventually(lambda: len(run.chunks("relay")) == 4 * 6 + 1, "the oldest versions go")
    client.prune({7})
    assert [p.name for p in (run.folder / "cache").glob("v*")] == ["v7"]


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


def first_chunk(run: Run) -> str:
    return _weights_chunks(run)[0]


def last_chunk(run: Run) -> str:
    return _weights_chunks(run)[-1]


def _weights_chunks(run: Run) -> list[str]:
    manifest = read_manifest(run.store / "demo" / "versions" / "0")
    return [chunk.blake3 for chunk in manifest.objects["model.safetensors"].chunks]
