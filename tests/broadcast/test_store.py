"""The store and its keys: what publishing leaves on disk, cut short, repeated, damaged, refused."""

from __future__ import annotations

import fcntl
import resource
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from broadcast.client import WeightsClient, WrongFiles
from broadcast.disk import ProvenChunks
from broadcast.layout import make_keys, renew_keys, stored_versions
from broadcast.manifest import MAX_CHUNK_BYTES
from broadcast.relay_store import TOUCH_EVERY_S, VALID_S, Pins, StoredVersions
from broadcast.store import AlreadyPublished, newest_version, prune, publish_objects, refresh_latest
from runspec.core.canonical import digest_bytes
from runspec.core.errors import UserError
from runspec.core.files import write_atomic
from runspec.core.roles import Roles, open_roles, sign_roles
from runspec.core.signed import SigningKey
from tests.broadcast.conftest import (
    CHUNK_BYTES,
    LOG,
    PATIENCE_S,
    Run,
    answer,
    fetched,
    newest,
    no_latest,
    not_fetched,
    warnings,
    weights,
    write_files,
)

DELTA = {"model.safetensors.delta": b"d" * 1500}
TENSORS = b'{"model_digest":null,"tensors":{},"files":["model.safetensors"]}'


def tree(folder: Path) -> dict[str, bytes]:
    """Every file below a folder that is no lock."""
    files = (p for p in folder.rglob("*") if p.is_file() and p.name != ".lock")
    return {str(p.relative_to(folder)): p.read_bytes() for p in files}


def test_what_is_published_is_the_same_wherever_and_however_often(run: Run, tmp_path: Path) -> None:
    directory = write_files(tmp_path / "files", weights())
    one, other = tmp_path / "one", tmp_path / "other"
    digests = [run.publish_folder(3, directory, store=store) for store in (one, other, one)]
    assert len(set(digests)) == 1
    ours, theirs = tree(one), tree(other)
    ours.pop("demo/latest.json"), theirs.pop("demo/latest.json")  # these hold the time
    assert ours == theirs


@pytest.mark.parametrize("role", ["origin", "relay"])
def test_a_publisher_killed_in_the_middle_leaves_a_store_that_serves(run: Run, role: str) -> None:
    # given a published version, and a publisher that died with the next one's chunks half written
    run.publish(0, weights())
    (run.path("chunks") / ".tmp-half-written").write_bytes(b"x" * 100)
    (run.path("chunks") / ("0" * 64)).write_bytes(b"of a manifest that never came")
    # when a client comes, then it gets the old version; and the next one after the restart
    client = run.client(run.server(role).url)
    assert fetched(client) == weights()
    run.publish(1, weights(seed=1))
    assert not run.path("chunks", ".tmp-half-written").exists()
    assert newest(client, 0).version == 1
    assert fetched(client, 1) == weights(seed=1)


def test_a_full_disk_leaves_the_store_as_it_was(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    run.publish(0, weights())
    before, write_bytes = tree(run.store), Path.write_bytes
    write_files(run.folder / "files", {"a": b"small", "b": b"x" * 30_000, "c": b"y" * 9_000})

    def full(path: Path, data: bytes) -> int:
        if bytes(data[:1]) == b"y":
            raise OSError(28, "No space left on device")
        return write_bytes(path, data)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", full)
        with pytest.raises(UserError, match="cannot store a chunk: No space left on device"):
            run.publish_folder(1, run.folder / "files")
    assert tree(run.store) == before


@pytest.mark.parametrize(
    ("versions", "seeds"), [((0, 0), (0, 0)), ((0, 0), (0, 1)), ((0, 1), (0, 1))]
)
def test_two_publishers_at_once_do_not_tear_the_store(run, versions, seeds):
    with ThreadPoolExecutor(2) as pool:
        files = [weights(200_000, seed=seed) for seed in seeds]
        made = [pool.submit(run.publish, *each) for each in zip(versions, files, strict=True)]
    failed = [number for number, each in enumerate(made) if each.exception() is not None]
    # then equal contents are published twice without harm; of others one wins, whole; and a number
    # below the newest is not taken up again, since it came too late
    assert seeds != (0, 0) or not failed
    assert (versions, seeds) != ((0, 0), (0, 1)) or len(failed) == 1
    assert versions != (0, 1) or 1 not in failed
    for number in failed:
        assert type(made[number].exception()) in (AlreadyPublished, UserError)
    client, last = run.client(run.static().url), max(versions)
    winner = next(n for n in (1, 0) if n not in failed and versions[n] == last)
    assert fetched(client, last, newest(client).manifest_digest) == files[winner]
    assert newest(client).version == last
    assert all(digest_bytes(path.read_bytes()) == path.name for path in run.chunks())


def test_a_second_publisher_waits_and_then_says_who_is_in_the_way(run, monkeypatch):
    monkeypatch.setattr("broadcast.store.LOCK_DEADLINE_S", 0.1)
    run.publish(0, weights())
    with run.path(".lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(UserError, match=r"another publisher .* held this store for 0\.1 s"):
            run.publish(1, weights(seed=1))
    assert newest_version(run.store, run="demo") == 0


def other_key(run: Run) -> None:
    run.key = SigningKey.generate()
    run.sign_roles(run.key)


def edited(name: str, text: bytes) -> Callable[[Run], object]:
    return lambda run: write_files(run.folder / "files", {name: text})


def emptied(run: Run) -> None:
    shutil.rmtree(run.folder / "files")
    (run.folder / "files").mkdir()


OTHERS = b'{"model_digest":null,"tensors":{},"files":["other.safetensors"]}'
REFUSED: dict[str, tuple[Callable[[Run], object], dict[str, Any], str]] = {
    "run": (lambda run: None, {"run": "../x"}, "run '../x' or version 1 is malformed"),
    "version": (lambda run: None, {"version": -1}, "or version -1 is malformed"),
    "chunks": (lambda run: None, {"chunk_bytes": 0}, "chunk_bytes 0 is not in 1 to"),
    "too large": (lambda run: None, {"chunk_bytes": MAX_CHUNK_BYTES + 1}, "is not in 1 to"),
    "itself": (lambda run: None, {"base": 1}, "base 1 is not an older published version"),
    "later": (lambda run: None, {"base": 7}, "base 7 is not an older published version"),
    "other files": (edited("tensors.json", OTHERS), {"base": 0}, "base 0 has other weights files"),
    "revoked": (other_key, {"base": 0}, r"base 0 will not be believed.*\n.*anchor"),
    "no base": (lambda run: None, {"whole": False}, "it has no base"),
    "no names": (
        lambda run: (run.folder / "files/tensors.json").unlink(),
        {"base": 0},
        r"tensors\.json names no files that hold the tensors",
    ),
    "no delta": (
        lambda run: (run.folder / "files/delta").rename(run.folder / "delta"),
        {"base": 0},
        r"python -m bridge diff BASE .*/files --out .*/files/delta",
    ),
    "torn": (edited("tensors.json", b"{}"), {}, r"tensors\.json: malformed: "),
    "a name": (edited(".hidden", b""), {}, r"\.hidden: cannot be published: a plain file"),
    "a folder": (lambda run: (run.folder / "files/x").mkdir(), {}, "cannot be published: a plain"),
    "gone": (lambda run: shutil.rmtree(run.folder / "files"), {}, "files: not a directory"),
    "empty": (emptied, {}, "files: nothing to publish"),
    "another key": (lambda run: setattr(run, "key", SigningKey.generate()), {}, "does not name"),
    "no roles": (lambda run: (run.keys / "roles.json").write_bytes(b"{}"), {}, "cannot read roles"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_no_client_would_accept_is_not_published(run: Run, what: str) -> None:
    prepare, options, said = REFUSED[what]
    run.publish(0, weights(), delta={})
    write_files(run.folder / "files", weights(seed=1) | {"tensors.json": TENSORS})
    write_files(run.folder / "files" / "delta", DELTA)
    prepare(run)
    before = tree(run.store)
    with pytest.raises(UserError, match=said):
        run.publish_folder(**{"version": 1, "directory": run.folder / "files"} | options)
    assert tree(run.store) == before


def test_a_number_is_published_once(run: Run) -> None:
    # given versions of which the oldest is pruned
    for version in range(3):
        run.publish(version, weights(seed=version))
    prune(run.store, run="demo", keep_versions=2)
    before = tree(run.store)
    # when its number is published again, with the same contents or others, then it is refused
    for seed in (0, 9):
        with pytest.raises(UserError, match=r"version 0 is gone.* the newest is 2"):
            run.publish(0, weights(seed=seed))
    # and so is one that is there, by another publisher's key
    run.publish(1, weights(seed=1))
    ours, run.key = run.key, SigningKey.generate()
    run.sign_roles(ours, run.key)
    with pytest.raises(AlreadyPublished, match="with other contents or by another key"):
        run.publish(1, weights(seed=1))
    assert tree(run.store) == before


def test_an_older_roles_file_does_not_replace_a_newer_one(run: Run) -> None:
    # given a store whose roles.json revokes a key that the one before named
    run.publish(0, weights())
    old, key, refresh = run.roles, run.key, {"run": "demo", "key": run.key}
    run.sign_roles(SigningKey.generate())
    refresh_latest(run.store, **refresh, roles=run.roles)
    assert run.path("roles.json").read_bytes() == run.roles
    before = tree(run.store)
    # when somebody publishes or refreshes with the old one, then nothing changes
    (run.keys / "roles.json").write_bytes(old)
    for publish in (
        lambda: run.publish(1, weights(seed=1)),
        lambda: refresh_latest(run.store, **refresh, roles=old),
    ):
        with pytest.raises(UserError, match="newer than the one to publish with"):
            publish()
    assert tree(run.store) == before
    # while a damaged one may be replaced, and what was not announced yet is announced
    run.path("roles.json").write_bytes(b"{}")
    run.path("latest.json").unlink()
    refresh_latest(run.store, **refresh, roles=old)
    assert (run.path("roles.json").read_bytes(), run.key) == (old, key)
    assert newest_version(run.store, run="demo") == 0


def test_prune_keeps_what_a_joiner_needs_and_what_is_read(run: Run) -> None:
    prune(run.store, run="demo", keep_versions=1)  # nothing is published yet
    # given whole versions 0 to 3, and deltas after them; somebody reads version 0
    for version in range(4):
        run.publish(version, weights(seed=version), delta={})
    for version in range(4, 8):
        delta = {"model.safetensors.delta": bytes([version]) * 1500}
        run.publish(version, weights(), base=version - 1, delta=delta, whole=False)
    pins = Pins(run.store, "demo")
    pins.touch(0)
    pins.touch(99)
    prune(run.store, run="demo", keep_versions=2)
    assert stored_versions(run.store, "demo") == [0, 3, 4, 5, 6, 7]
    needed = {digest for v in (0, *range(3, 8)) for digest in run.manifest(v).chunks()}
    assert {path.name for path in run.chunks()} == needed
    assert pins.newest_first() == [0]
    # and where a manifest is damaged since, it removes nothing
    run.path("versions/3/manifest.json").write_text("{}")
    before = tree(run.store)
    with pytest.raises(UserError, match=r"versions/3/manifest\.json: damaged"):
        prune(run.store, run="demo", keep_versions=1)
    assert tree(run.store) == before
    run.path("latest.json").write_text("{}")
    with pytest.raises(UserError, match=r"latest\.json: damaged"):
        newest_version(run.store, run="demo")


async def test_a_chunk_that_could_not_be_read_is_not_damaged_for_ever(tmp_path: Path) -> None:
    # given a good chunk, and a moment in which no more files may be opened
    path = tmp_path / digest_bytes(b"chunk")
    path.write_bytes(b"chunk")
    proven, limits = ProvenChunks(), resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        assert not await proven.prove(path)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    # then it is served once it can be read, and not once it has changed
    assert path not in proven and await proven.prove(path) and path in proven
    path.write_bytes(b"other")
    assert path not in proven and not await proven.prove(path) and path not in proven


# -- Pins: versions that are being read, shared between processes by files -------------------------


def test_interest_ends_after_ten_minutes_without_any(tmp_path: Path) -> None:
    now = [1_800_000_000.0]
    pins, file = Pins(tmp_path, "demo", clock=lambda: now[0]), tmp_path / "demo/pins/1"
    pins.touch(1)
    now[0] += TOUCH_EVERY_S - 0.1
    pins.touch(1)
    assert file.stat().st_mtime == 1_800_000_000.0  # it is written every few seconds at most
    now[0] += 0.1
    pins.touch(1)
    assert file.stat().st_mtime == now[0]
    now[0] += VALID_S - 1
    pins.touch(2)
    (tmp_path / "demo/pins/stray").touch()
    assert pins.newest_first() == [2, 1]
    now[0] += 1
    assert pins.newest_first() == [2]
    pins.keep_only({2})
    assert [path.name for path in file.parent.iterdir()] == ["2"]
    # where nothing can be noted, readers are served all the same
    (tmp_path / "other").touch()
    pins = Pins(tmp_path, "other")
    pins.touch(1)
    assert pins.newest_first() == []


def test_what_is_asked_for_pins_the_version_that_alone_has_it(run, monkeypatch):
    for version in range(3):
        run.publish(version, weights(seed=version))
    url, (own, *_) = f"{run.origin().url}/demo", run.weights_chunks(1)
    shared = run.manifest(1).objects["config.json"].chunks[0]
    pins = Pins(run.store, "demo")
    assert answer(f"{url}/versions/7/manifest.json").status_code == 404
    for name in ("latest.json", f"chunks/{shared.blake3}"):
        assert answer(f"{url}/{name}").status_code == 200
    assert pins.newest_first() == []
    assert answer(f"{url}/chunks/{own.blake3}").status_code == 200
    assert pins.newest_first() == [1]
    assert answer(f"{url}/versions/2/manifest.json").status_code == 200
    assert sorted(pins.newest_first()) == [1, 2]


async def test_manifests_are_parsed_once_for_each_file(run, monkeypatch, caplog):
    monkeypatch.setattr("broadcast.relay_store.MANIFESTS_EVERY_S", 0.0)
    run.publish(0, weights())
    manifests = StoredVersions(run.store, run.name, LOG)
    first = await manifests.current()
    run.publish(1, weights(seed=1))
    await manifests.note_reader(run.weights_chunks(1)[0].blake3)
    assert manifests.pins.newest_first() == [1]
    second = await manifests.current()
    assert second[0] is first[0] and sorted(second) == [0, 1]
    # and a damaged one is left out, and said once
    damaged = run.path("versions/0/manifest.json")
    write_atomic(damaged, damaged.read_bytes()[:-1])
    for _ in range(3):
        assert list(await manifests.current()) == [1]
    (said,) = warnings(caplog)
    assert f"{damaged}: damaged" in said


# -- Stores of learner islands: signed by an island's key, from memory, in any order ---------------

SHARE = {"share.bin": b"".join(i.to_bytes(8, "little") for i in range(700))}


class Islands:
    """A run of one island `a`, which publishes to the run's store."""

    def __init__(self, run: Run) -> None:
        self.run, self.key = run, SigningKey.generate()
        named = {"publisher": [run.key.public_hex], "coordinator": [], "validator": []}
        root, islands = SigningKey.load(run.keys / "root.key"), {"a": self.key.public_hex}
        roles = sign_roles("demo", named, root, valid_s=9e3, now=time.time() + 1, islands=islands)
        (run.keys / "roles.json").write_bytes(roles)

    def put(self, version: int, files: dict[str, bytes] = SHARE, **options: Any) -> str:
        said = {"run": "demo", "version": version, "chunk_bytes": CHUNK_BYTES, "key": self.key}
        views = {name: memoryview(data) for name, data in files.items()}
        return publish_objects(self.run.store, views, roles=self.run.roles, **said | options)

    def client(self, url: str) -> WeightsClient:
        return self.run.client(url, signers="island")


@pytest.fixture
def islands(run: Run) -> Islands:
    return Islands(run)


@pytest.mark.usefixtures("patient")
def test_what_an_island_signed_is_known_by_its_digest(islands: Islands) -> None:
    digests = {v: islands.put(v, {"share.bin": b"x" * v}) for v in (9, 5, 11, 8)}
    digests[7] = islands.put(7)
    client = islands.client(islands.run.origin().url)
    sizes = {"share.bin": 5600}
    path = client.fetch(7, manifest_digest=digests[7], deadline_s=PATIENCE_S, sizes=sizes)
    assert (path / "share.bin").read_bytes() == SHARE["share.bin"]
    assert client.received == 5600 and newest(client).version == 11
    # versions come in any order, the newest by number stay, and a pruned one may come again
    store = islands.run.store
    for pin in (store / "demo" / "pins").iterdir():
        pin.unlink()
    prune(store, run="demo", keep_versions=2)
    assert stored_versions(store, "demo") == [9, 11] and len(islands.run.chunks()) == 2
    assert islands.put(5, {"share.bin": b"x" * 5}) == digests[5]
    # while other contents are refused by the digest that is there
    before = tree(store)
    with pytest.raises(AlreadyPublished, match="version 9 is published already") as caught:
        islands.put(9, {"share.bin": b"another"})
    assert caught.value.manifest_digest == digests[9] and tree(store) == before


def test_each_kind_of_store_takes_and_gives_what_its_own_signers_signed(islands: Islands) -> None:
    with pytest.raises(UserError, match=r"does not name .* as island of run 'demo'"):
        islands.put(1, key=islands.run.key)
    islands.put(1)
    url = islands.run.origin().url
    not_fetched(islands.run.client(url), "which may not sign it", version=1)
    no_latest(islands.run.client(url), "which may not sign it")
    with pytest.raises(UserError, match=r"does not name .* as publisher of run 'demo'"):
        islands.run.publish_folder(2, islands.run.folder, key=islands.key)
    islands.run.publish(2, SHARE)
    not_fetched(islands.client(url), "which may not sign it", version=2)
    # and islands stay named when another key is renewed
    renew_keys(islands.run.keys, ["publisher"])
    assert roles_in(islands.run.keys).islands == {"a": islands.key.public_hex}


@pytest.mark.parametrize(
    "files",
    [{"share.bin": b"x" * 5601}, {"share.bin": b"x" * 5600, "more": b""}, {"other": b"x" * 5600}],
    ids=["size", "another file", "name"],
)
def test_other_files_than_expected_are_refused_before_a_chunk_is_fetched(islands, files):
    digest, server = islands.put(3, files), islands.run.static()
    client, sizes = islands.client(server.url), {"share.bin": 5600}
    with pytest.raises(WrongFiles, match=r"must be share.bin of 5600 bytes; .* names ") as caught:
        client.fetch(3, manifest_digest=digest, deadline_s=PATIENCE_S, sizes=sizes)
    assert caught.value.place == server.url
    assert server.asked("/chunks/") == 0 and client.received == 0


# -- Keys: made once, renewed one by one -----------------------------------------------------------


def roles_in(keys: Path) -> Roles:
    root = (keys / "root.pub").read_text().strip()
    return open_roles((keys / "roles.json").read_bytes(), root_public_key=root, run="demo")


def test_keys_are_renewed_one_by_one(tmp_path: Path) -> None:
    make_keys(tmp_path, run="demo", validators=3)
    names = ["publisher", "coordinator", "evaluator", *(f"validator-{i}" for i in range(3))]

    def public() -> dict[str, str]:
        return {name: SigningKey.load(tmp_path / f"{name}.key").public_hex for name in names}

    before, old = public(), roles_in(tmp_path)
    (tmp_path / "publisher.new").write_text("left by an interrupted renewal")
    renew_keys(tmp_path, ["validator-1", "publisher"])
    after, new = public(), roles_in(tmp_path)
    assert {name for name in names if before[name] != after[name]} == {"validator-1", "publisher"}
    assert new.publisher == {after["publisher"]} and new.coordinator == old.coordinator
    assert new.validator == {after[f"validator-{i}"] for i in range(3)}
    assert new.evaluator == {after["evaluator"]} and not list(tmp_path.glob("*.new"))
    # each is issued later, even by a clock that was set back
    renew_keys(tmp_path, [])
    assert roles_in(tmp_path).issued >= new.issued + 1.0 >= old.issued + 2.0
    # no key is overwritten, and no other name is one
    files = tree(tmp_path)
    with pytest.raises(UserError, match=r"root\.key exists already"):
        make_keys(tmp_path, run="demo")
    for name in ("root", "validator", "validator-3", "validator-00", "../publisher", ""):
        with pytest.raises(UserError, match=f"there is no key '{name}'"):
            renew_keys(tmp_path, [name])
    assert tree(tmp_path) == files


def test_expired_roles_are_renewed_and_those_of_another_root_are_not(tmp_path, monkeypatch):
    for name in ("ours", "theirs"):
        with monkeypatch.context() as patch:
            patch.setattr("broadcast.layout.VALID_S", -1000.0)
            make_keys(tmp_path / name, run="demo")
        (tmp_path / name / "publisher.key").unlink()  # private keys may lie elsewhere
    theirs = (tmp_path / "theirs" / "roles.json").read_bytes()
    renew_keys(tmp_path / "ours", [])
    assert roles_in(tmp_path / "ours").expires > time.time()
    (tmp_path / "ours" / "roles.json").write_bytes(theirs)
    with pytest.raises(UserError, match="cannot be renewed"):
        renew_keys(tmp_path / "ours", ["publisher"])
