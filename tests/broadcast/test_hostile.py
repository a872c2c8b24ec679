"""Servers that lie, drip, damage or vanish: nothing wrong is accepted, nothing hangs."""

from __future__ import annotations

import json
import logging
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from broadcast.store import publish
from runspec.common.canonical import canonical_json
from runspec.common.errors import UserError
from runspec.common.hashing import digest_bytes
from runspec.common.keys import SigningKey
from runspec.common.latest import KIND, sign_latest
from runspec.common.roles import sign_roles
from runspec.common.signed import sign_document

from .conftest import Run, contents, weights


def damaged_copy(run: Run, damage: str) -> Path:
    """A copy of the run's store in which every chunk of the weights is wrong."""
    copy = run.folder / "damaged"
    shutil.copytree(run.store, copy)
    for path in (copy / "demo" / "chunks").iterdir():
        data = bytearray(path.read_bytes())
        if len(data) > 100:
            if damage == "flipped bit":
                data[len(data) // 2] ^= 1
            elif damage == "truncated":
                del data[-1]
            else:
                data.append(0)
            path.write_bytes(data)
    return copy


@pytest.mark.parametrize("damage", ["flipped bit", "truncated", "too long"])
def test_a_damaged_chunk_is_blamed_and_fetched_elsewhere(
    run: Run, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    run.publish(0, weights())
    bad, good = run.static(damaged_copy(run, damage)), run.static()
    client = run.client(bad.url, good.url)

    with caplog.at_level(logging.WARNING):
        path = client.fetch(0, manifest_digest=None, deadline_s=10)

    assert contents(path) == weights()
    blamed = [r.getMessage() for r in caplog.records if r.getMessage().startswith(bad.url)]
    assert any("model.safetensors at byte" in line for line in blamed)
    assert not any(r.getMessage().startswith(good.url) for r in caplog.records)
    assert good.chunk_requests() <= 7  # each chunk once at most: only what was bad came again


def test_with_nobody_honest_the_fetch_fails_and_names_relay_and_chunk(run: Run) -> None:
    run.publish(0, weights())
    bad = run.static(damaged_copy(run, "flipped bit"))
    client = run.client(bad.url)

    with pytest.raises(UserError) as raised:
        client.fetch(0, manifest_digest=None, deadline_s=1)

    assert bad.url in str(raised.value)
    assert "model.safetensors at byte" in str(raised.value)
    assert not (run.folder / "cache" / "v0").exists()


def test_a_bit_that_flips_on_a_relays_disk_is_mended_from_its_upstream(run: Run) -> None:
    run.publish(0, weights())
    origin = run.origin()
    relay = run.relay(origin.url)
    run.client(relay.url).fetch(0, manifest_digest=None, deadline_s=10)
    relay.stop()
    for path in run.chunks("relay"):
        path.write_bytes(bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:])

    again = run.relay(origin.url)

    client = run.client(again.url, cache="second")
    assert contents(client.fetch(0, manifest_digest=None, deadline_s=10)) == weights()
    for path in run.chunks("relay"):
        assert digest_bytes(path.read_bytes()) == path.name


def test_a_relay_never_passes_on_what_its_upstream_damaged(run: Run) -> None:
    run.publish(0, weights())
    bad = run.static(damaged_copy(run, "flipped bit"))
    relay = run.relay(bad.url)
    client = run.client(relay.url)

    with pytest.raises(UserError):
        client.fetch(0, manifest_digest=None, deadline_s=1)

    assert all(digest_bytes(p.read_bytes()) == p.name for p in run.chunks("relay"))


def test_an_old_version_does_not_pass_for_the_newest(run: Run) -> None:
    run.publish(0, weights())
    old = run.folder / "old"
    shutil.copytree(run.store, old)
    run.publish(1, weights(seed=1))
    client = run.client(run.origin().url)
    seen = client.latest(None, 10)
    assert seen is not None and seen.version == 1
    stale = run.static(old)

    # The same cache directory: a restarted client has not forgotten either.
    with pytest.raises(UserError, match="offers version 0 as the newest, 1 was seen"):
        run.client(stale.url).latest(None, 0.3)

    # And beside an honest server the stale one hides nothing.
    both = run.client(stale.url, run.static().url, cache="both").latest(0, 10)
    assert both is not None and both.version == 1


def test_an_expired_latest_is_refused(run: Run) -> None:
    digest = run.publish(0, weights())
    now = time.time()
    payload = {"run": "demo", "version": 0, "manifest_digest": digest}
    expired = sign_document(KIND, payload | {"issued": now - 2000, "expires": now - 1000}, run.key)
    (run.store / "demo" / "latest.json").write_bytes(expired)

    with pytest.raises(UserError, match="expired 1000 s ago"):
        run.client(run.static().url).latest(None, 0.3)


def test_another_runs_files_are_refused(run: Run, other_run: Run) -> None:
    """Signed by the same publisher, for another run, and served under this one's path."""
    run.publish(0, weights())
    other_run.key = run.key
    keys = {"publisher": [run.key.public_hex], "coordinator": [], "validator": []}
    root = SigningKey.load(run.keys / "root.key")
    (other_run.keys / "roles.json").write_bytes(sign_roles("other", keys, root, valid_s=1000))
    other_run.publish(0, weights(seed=1))
    (run.store / "demo" / "latest.json").unlink()
    for name in ("latest.json", "versions/0/manifest.json"):
        shutil.copy(other_run.store / "other" / name, run.store / "demo" / name)
    client = run.client(run.static().url)

    with pytest.raises(UserError, match="of run 'other', not 'demo'"):
        client.latest(None, 0.3)
    with pytest.raises(UserError, match="of run 'other', not 'demo'"):
        client.fetch(0, manifest_digest=None, deadline_s=0.3)


def test_a_stranger_cannot_publish(run: Run, tmp_path: Path) -> None:
    """A whole store by another root, and a strange key under the right roles.json."""
    stranger = Run(tmp_path / "stranger", run._stack)
    stranger.publish(0, weights())
    served = run.static(stranger.store)
    with pytest.raises(UserError, match="roles: signed by"):
        run.client(served.url).latest(None, 0.3)

    (stranger.store / "demo" / "roles.json").write_bytes(run.roles)
    with pytest.raises(UserError, match="latest: signed by"):
        run.client(served.url).latest(None, 0.3)
    with pytest.raises(UserError, match="weights: signed by"):
        run.client(served.url).fetch(0, manifest_digest=None, deadline_s=0.3)


def test_a_revoked_key_stays_revoked(run: Run) -> None:
    """A client that saw newer roles is not talked back to the old ones."""
    run.publish(0, weights())
    old = run.folder / "old"
    shutil.copytree(run.store, old)
    new_key = SigningKey.generate()
    keys = {"publisher": [new_key.public_hex], "coordinator": [], "validator": []}
    root = SigningKey.load(run.keys / "root.key")
    (run.keys / "roles.json").write_bytes(sign_roles("demo", keys, root, valid_s=1000))
    run.key = new_key
    run.publish(1, weights(seed=1))
    assert run.client(run.static().url).latest(None, 10) is not None

    # With the old roles.json, a manifest for a version yet to come, by the key that was stolen.
    with pytest.raises(UserError, match="weights: signed by"):
        run.client(run.static(old).url).fetch(0, manifest_digest=None, deadline_s=0.3)


def test_new_publishers_are_learnt_from_newer_roles(run: Run) -> None:
    run.publish(0, weights())
    server = run.static()
    client = run.client(server.url)
    assert client.latest(None, 10) is not None
    keys = {"publisher": [], "coordinator": [], "validator": []}
    run.key = SigningKey.generate()
    keys["publisher"].append(run.key.public_hex)
    root = SigningKey.load(run.keys / "root.key")
    (run.keys / "roles.json").write_bytes(sign_roles("demo", keys, root, valid_s=1000))

    run.publish(1, weights(seed=1))

    latest = client.latest(0, 10)
    assert latest is not None and latest.version == 1


def test_an_unknown_algorithm_is_refused(run: Run) -> None:
    run.publish(0, weights())
    path = run.store / "demo" / "latest.json"
    path.write_bytes(canonical_json(json.loads(path.read_bytes()) | {"algorithm": "none"}))

    with pytest.raises(UserError, match="unknown algorithm 'none'"):
        run.client(run.static().url).latest(None, 0.3)


def test_only_the_manifest_that_was_named_is_accepted(run: Run) -> None:
    run.publish(0, weights())

    with pytest.raises(UserError, match="its digest is"):
        run.client(run.static().url).fetch(0, manifest_digest="0" * 64, deadline_s=0.3)


def test_a_version_number_cannot_change_its_meaning(run: Run) -> None:
    run.publish(0, weights())
    client = run.client(run.static().url)
    assert client.latest(None, 10) is not None
    other = sign_latest("demo", 0, "1" * 64, run.key)
    (run.store / "demo" / "latest.json").write_bytes(other)

    with pytest.raises(UserError, match="names another manifest for version 0"):
        client.latest(None, 0.3)


@pytest.fixture
def dripping() -> Iterator[str]:
    """A server that answers every request with an endless slow drip of a body."""
    listener = socket.create_server(("127.0.0.1", 0))
    stop = threading.Event()

    def drip(connection: socket.socket) -> None:
        with closing(connection):
            try:
                connection.recv(4096)
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 900\r\n\r\n")
                while not stop.wait(0.05):
                    connection.sendall(b"x")
            except OSError:
                return

    def accept() -> None:
        while not stop.is_set():
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=drip, args=(connection,), daemon=True).start()

    thread = threading.Thread(target=accept)
    thread.start()
    yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    stop.set()
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    thread.join()


def test_a_drip_does_not_outlast_the_deadline(run: Run, dripping: str) -> None:
    started = time.monotonic()

    with pytest.raises(UserError, match=dripping):
        run.client(dripping).fetch(0, manifest_digest=None, deadline_s=1)

    assert time.monotonic() - started < 3


def test_a_drip_is_passed_over(run: Run, dripping: str) -> None:
    digest = run.publish(0, weights())
    client = run.client(dripping, run.static().url)

    latest = client.latest(None, 10)

    assert latest is not None and latest.manifest_digest == digest


def test_a_huge_answer_is_refused_unread(run: Run) -> None:
    run.publish(0, weights())
    (run.store / "demo" / "latest.json").write_bytes(b" " * 10_000_000)

    with pytest.raises(UserError, match="10000000 bytes, at most 4096 expected"):
        run.client(run.static().url).latest(None, 0.3)


def test_no_server_at_all_is_named(run: Run) -> None:
    gone = run.origin()
    gone.stop()
    started = time.monotonic()

    with pytest.raises(UserError, match=gone.url):
        run.client(gone.url).fetch(0, manifest_digest=None, deadline_s=1)

    assert time.monotonic() - started < 3


def test_two_publishers_do_not_tear_the_store(run: Run, tmp_path: Path) -> None:
    """Both publish the same version with other contents at once: one wins, whole."""
    failures: list[UserError] = []
    directories = []
    for seed in range(2):
        directory = tmp_path / str(seed)
        directory.mkdir()
        for name, data in weights(seed=seed).items():
            (directory / name).write_bytes(data)
        directories.append(directory)

    def attempt(directory: Path) -> None:
        try:
            publish(
                run.store,
                directory,
                run="demo",
                version=0,
                key=run.key,
                roles=run.roles,
                chunk_bytes=1000,
            )
        except UserError as error:
            failures.append(error)

    threads = [threading.Thread(target=attempt, args=(d,)) for d in directories]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len(failures) == 1 and "published already" in str(failures[0])
    path = run.client(run.origin().url).fetch(0, manifest_digest=None, deadline_s=10)
    assert contents(path) in (weights(seed=0), weights(seed=1))
