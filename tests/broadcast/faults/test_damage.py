"""Chunks that are damaged where they lie: blamed by name, fetched elsewhere, and only they."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from broadcast.manifest import Chunk, read_manifest
from runspec.core.errors import UserError
from runspec.core.hashing import digest_bytes

from ..conftest import Run, contents, weights
from ..fake_relay import cut_off, flipped, honest, only

FIFTH = 4
"""Which chunk of the weights is the one that is damaged."""


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def cut_the_end(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def add_a_byte(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def empty(path: Path) -> None:
    path.write_bytes(b"")


DAMAGES = [flip_a_bit, cut_the_end, add_a_byte, empty]


def chunks_of_weights(run: Run, version: int = 0) -> tuple[Chunk, ...]:
    directory = run.store / "demo" / "versions" / str(version)
    return read_manifest(directory).objects["model.safetensors"].chunks


@pytest.mark.parametrize("damage", DAMAGES)
def test_an_origin_serves_nothing_damaged_and_is_mended_by_publishing_again(
    run: Run, damage: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    # given an origin on whose disk every chunk of the weights is damaged, and a good server
    digest = run.publish(0, weights())
    good = run.folder / "good"
    shutil.copytree(run.store, good)
    origin = run.origin()
    for chunk in chunks_of_weights(run):
        damage(run.store / "demo" / "chunks" / chunk.blake3)
    # when clients fetch, then with the good server beside it one has the truth
    both = run.client(origin.url, run.static(good).url, cache="both")
    assert contents(both.fetch(0, manifest_digest=digest, deadline_s=10)) == weights()
    # and without, the failure names the origin and the chunk, and the origin's log its file
    alone = run.client(origin.url)
    with caplog.at_level(logging.ERROR), pytest.raises(UserError) as failure:
        alone.fetch(0, manifest_digest=digest, deadline_s=1)
    assert origin.url in str(failure.value) and ", chunk " in str(failure.value)
    assert any("damaged, not served" in record.getMessage() for record in caplog.records)
    # and published again it is mended, for the origin that runs on as well
    assert run.publish(0, weights()) == digest
    assert contents(alone.fetch(0, manifest_digest=digest, deadline_s=10)) == weights()


@pytest.mark.parametrize("lie", [flipped, cut_off])
def test_only_the_bad_chunk_is_fetched_again(run: Run, lie: Callable) -> None:
    # given the only server there is, which sends one chunk wrong, once
    run.publish(0, weights())
    server = run.static()
    bad = chunks_of_weights(run)[FIFTH].blake3
    server.answer(bad, only(1, lie))
    # when a client fetches
    path = run.client(server.url).fetch(0, manifest_digest=None, deadline_s=10)
    # then that chunk was asked for twice and every other one once
    assert contents(path) == weights()
    assert {p.name: server.asked(p.name) for p in run.chunks()} == {
        p.name: 2 if p.name == bad else 1 for p in run.chunks()
    }


def test_what_is_damaged_in_a_partial_download_is_fetched_again(run: Run) -> None:
    # given a download that was broken off with all but one chunk on disk
    run.publish(0, weights())
    server = run.static()
    missing, damaged = (chunks_of_weights(run)[number] for number in (FIFTH, 1))
    server.answer(missing.blake3, flipped)
    with pytest.raises(UserError) as failure:
        run.client(server.url).fetch(0, manifest_digest=None, deadline_s=1)
    place = f"model.safetensors at byte {FIFTH * 1000}, chunk {missing.blake3[:16]}"
    assert place in str(failure.value) and server.url in str(failure.value)
    # when a bit flips in what lies there, and the client starts again
    partial = run.folder / "cache" / ".partial-v0" / "model.safetensors"
    data = bytearray(partial.read_bytes())
    data[1500] ^= 1
    partial.write_bytes(data)
    server.answer(missing.blake3, honest)
    server.paths.clear()
    path = run.client(server.url).fetch(0, manifest_digest=None, deadline_s=10)
    # then exactly the missing and the damaged chunk are fetched
    assert contents(path) == weights()
    asked = {path.rpartition("/")[2] for path in server.paths if "/chunks/" in path}
    assert asked == {missing.blake3, damaged.blake3}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("restarted", [False, True], ids=["running", "restarted"])
def test_what_is_damaged_on_a_relays_disk_is_mended_from_its_upstream(
    run: Run, restarted: bool, damage: Callable[[Path], None]
) -> None:
    # given a relay that has served a version, and whose chunks get damaged on its disk
    run.publish(0, weights())
    upstream = run.static()
    relay = run.relay(upstream.url)
    run.client(relay.url, cache="before").fetch(0, manifest_digest=None, deadline_s=10)
    if restarted:
        relay.stop()
    for path in run.chunks("relay"):
        damage(path)
    if restarted:
        relay = run.relay(upstream.url)
    # when a client comes that knows no other server
    upstream.paths.clear()
    path = run.client(relay.url).fetch(0, manifest_digest=None, deadline_s=10)
    # then it has the truth, which the relay got anew, each chunk once
    assert contents(path) == weights()
    assert upstream.asked() == len(run.chunks())
    assert all(digest_bytes(path.read_bytes()) == path.name for path in run.chunks("relay"))


def test_a_relay_never_passes_on_what_its_upstream_damaged(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    # given a relay behind a server on whose disk every chunk is damaged, and a good one
    run.publish(0, weights())
    good = run.folder / "good"
    shutil.copytree(run.store, good)
    for path in run.chunks():
        flip_a_bit(path)
    bad_server, good_server = run.static(), run.static(good)
    relay = run.relay(bad_server.url)
    # when a client asks for them, then it gets none and nothing wrong lies in the relay's store
    with pytest.raises(UserError):
        run.client(relay.url).fetch(0, manifest_digest=None, deadline_s=1)
    named = [p for p in run.chunks("relay") if not p.name.startswith(".")]
    assert all(digest_bytes(path.read_bytes()) == path.name for path in named)
    # and a relay that knows the good one too fetches there, and names the other
    relay = run.relay(bad_server.url, good_server.url, name="both")
    path = run.client(relay.url, cache="both").fetch(0, manifest_digest=None, deadline_s=10)
    assert contents(path) == weights()
    assert any(r.getMessage().startswith(bad_server.url) for r in caplog.records)
