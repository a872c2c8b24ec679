"""The store: what publishing leaves on disk, cut short, repeated, damaged, or refused."""

from __future__ import annotations

import fcntl
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from broadcast.chunk_files import ProvenChunks
from broadcast.manifest import MAX_BYTES, WeightsManifest, open_manifest
from broadcast.pins import Pins
from broadcast.store import newest_version, prune, publish, refresh_latest
from runspec.core.errors import UserError
from runspec.core.hashing import digest_bytes
from runspec.core.keys import SigningKey
from runspec.core.roles import sign_roles

from .conftest import CHUNK_BYTES, Run, weights

DELTA = {"model.safetensors.delta": b"d" * 1500}


def tree(folder: Path) -> dict[str, bytes]:
    """Every file below a folder that is no lock or pin."""
    files = (p for p in folder.rglob("*") if p.is_file() and p.name != ".lock")
    return {str(p.relative_to(folder)): p.read_bytes() for p in files}


def stored(run: Run, version: int) -> WeightsManifest:
    data = (run.store / run.name / "versions" / str(version) / "manifest.json").read_bytes()
    assert len(data) <= MAX_BYTES
    return open_manifest(data, run=run.name, publishers={run.key.public_hex})


def files_in(folder: Path, files: dict[str, bytes]) -> Path:
    folder.mkdir()
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return folder


def test_an_anchor_with_a_base_holds_files_and_delta(run: Run) -> None:
    run.publish(0, weights(), delta={})
    run.publish(1, weights(seed=1), base=0, delta=DELTA)

    manifest = stored(run, 1)
    assert manifest.is_anchor
    assert (manifest.base, manifest.files) == (0, ("model.safetensors",))
    assert manifest.objects.keys() == {"model.safetensors", "config.json"}
    assert manifest.delta["model.safetensors.delta"].size == 1500


def test_a_delta_alone_leaves_the_weights_out(run: Run) -> None:
    run.publish(0, weights(), delta={})
    before = len(run.chunks())
    run.publish(1, weights(seed=1), base=0, delta=DELTA, whole=False)

    manifest = stored(run, 1)
    assert not manifest.is_anchor
    assert manifest.objects.keys() == {"config.json"}
    assert len(run.chunks()) - before == 2  # of the delta; the config was there


def test_what_is_published_is_the_same_wherever_and_however_often(run: Run, tmp_path: Path) -> None:
    directory = files_in(tmp_path / "files", weights())

    def publish_to(store: Path) -> str:
        return publish(
            store,
            directory,
            run="demo",
            version=3,
            key=run.key,
            roles=run.roles,
            chunk_bytes=CHUNK_BYTES,
        )

    one, other = tmp_path / "one", tmp_path / "other"
    assert publish_to(one) == publish_to(other) == publish_to(one)
    ours, theirs = tree(one), tree(other)
    ours.pop("demo/latest.json"), theirs.pop("demo/latest.json")  # these hold the time
    assert ours == theirs


async def test_a_chunk_that_could_not_be_read_is_not_damaged_for_ever(tmp_path: Path) -> None:
    # given a good chunk, and a moment in which no more files may be opened
    path = tmp_path / digest_bytes(b"chunk")
    path.write_bytes(b"chunk")
    proven = ProvenChunks()
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        assert not await proven.prove(path)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    # then it is served once it can be read
    assert await proven.prove(path)


def test_a_full_disk_leaves_the_store_as_it_was(run: Run, tmp_path: Path) -> None:
    """The kernel's limit on file sizes stands in for the full disk: the same failed write()."""
    # given a store, and a version whose second file has chunks that the disk will not take
    run.publish(0, weights())
    before = tree(run.store)
    directory = files_in(tmp_path / "files", {"a": b"small", "b": b"x" * 30_000})

    limited = (
        "import resource, signal, sys; from broadcast.__main__ import main; "
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
        "resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000)); sys.exit(main())"
    )

    # when it is published
    done = subprocess.run(
        [
            *(sys.executable, "-c", limited, "publish", str(run.store), str(directory)),
            *("--run", "demo", "--version", "1", "--key", str(run.keys / "publisher.key")),
        ],
        capture_output=True,
        text=True,
        timeout=60,
    )

    # then the message says so, and nothing of it is there
    assert done.returncode == 1
    assert "cannot store a chunk: File too large" in done.stderr
    assert tree(run.store) == before


def test_a_second_publisher_waits_and_then_says_who_is_in_the_way(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("broadcast.store.LOCK_DEADLINE_S", 0.1)
    run.publish(0, weights())
    directory = files_in(tmp_path / "files", weights(seed=1))
    with (run.store / "demo" / ".lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(UserError, match=r"another publisher .* held this store for 0\.1 s"):
            publish(
                run.store,
                directory,
                run="demo",
                version=1,
                key=run.key,
                roles=run.roles,
            )
    assert newest_version(run.store, run="demo") == 0


def test_another_publishers_key_does_not_publish_a_version_again(run: Run) -> None:
    run.publish(0, weights())
    before = tree(run.store)
    ours, run.key = run.key, SigningKey.generate()
    name_publishers(run, ours, run.key)

    with pytest.raises(UserError, match="published already, with other contents or by another key"):
        run.publish(0, weights())

    assert tree(run.store) == before


def test_a_base_must_be_one_that_followers_will_believe(run: Run) -> None:
    # given a version of a publisher whose key is revoked since
    run.publish(0, weights(), delta={})
    run.key = SigningKey.generate()
    name_publishers(run, run.key)

    # when its successor publishes a delta from it, then it is told to publish an anchor
    with pytest.raises(UserError, match=r"base 0 will not be believed.*\n.*anchor"):
        run.publish(1, weights(seed=1), base=0, delta=DELTA)
    run.publish(1, weights(seed=1))


def test_an_older_roles_file_does_not_replace_a_newer_one(run: Run) -> None:
    # given a store whose roles.json revokes a key that the one before named
    run.publish(0, weights())
    old, key = run.roles, run.key
    name_publishers(run, SigningKey.generate())
    refresh_latest(run.store, run="demo", key=key, roles=run.roles)
    stored_roles = (run.store / "demo" / "roles.json").read_bytes()
    assert stored_roles == run.roles

    # when somebody publishes or refreshes with the old one, then nothing changes
    (run.keys / "roles.json").write_bytes(old)
    with pytest.raises(UserError, match="newer than the one to publish with"):
        run.publish(1, weights(seed=1))
    with pytest.raises(UserError, match="newer than the one to publish with"):
        refresh_latest(run.store, run="demo", key=key, roles=old)
    assert (run.store / "demo" / "roles.json").read_bytes() == stored_roles
    assert newest_version(run.store, run="demo") == 0


@pytest.mark.parametrize("text", [b"", b"{}", b"x" * 100_000])
def test_roles_that_cannot_be_read_publish_nothing(run: Run, text: bytes) -> None:
    (run.keys / "roles.json").write_bytes(text)
    with pytest.raises(UserError, match=r"cannot read roles\.json"):
        run.publish(0, weights())


@pytest.mark.parametrize(
    ("base", "said"), [(1, "base 1 is not an older"), (7, "base 7 is not an older")]
)
def test_a_base_must_be_published_before(run: Run, base: int, said: str) -> None:
    run.publish(0, weights(), delta={})
    with pytest.raises(UserError, match=said):
        run.publish(1, weights(), base=base, delta=DELTA)
    assert newest_version(run.store, run="demo") == 0


def test_a_base_has_the_same_weights_files(run: Run) -> None:
    run.publish(0, {"other.safetensors": b"x"}, delta={})
    with pytest.raises(UserError, match="base 0 has other weights files"):
        run.publish(1, weights(), base=0, delta=DELTA)


def test_a_base_without_a_delta_says_how_to_make_it(run: Run, tmp_path: Path) -> None:
    run.publish(0, weights(), delta={})
    tensors = b'{"model_digest":null,"tensors":{},"files":["model.safetensors"]}'
    directory = files_in(tmp_path / "files", {**weights(seed=1), "tensors.json": tensors})
    common = {"run": "demo", "version": 1, "key": run.key, "roles": run.roles}

    with pytest.raises(UserError) as raised:
        publish(run.store, directory, base=0, **common)
    assert f"python -m bridge diff BASE {directory} --out {directory / 'delta'}" in str(
        raised.value
    )

    with pytest.raises(UserError, match="it has no base"):
        publish(run.store, directory, whole=False, **common)


def test_weights_that_nobody_named_have_no_delta(run: Run, tmp_path: Path) -> None:
    run.publish(0, weights())
    directory = files_in(tmp_path / "files", weights(seed=1))
    with pytest.raises(UserError, match=r"tensors\.json names no files"):
        publish(run.store, directory, run="demo", version=1, key=run.key, roles=run.roles, base=0)


def test_prune_keeps_what_a_joiner_needs_and_what_is_read(run: Run) -> None:
    # given whole versions 0 to 2, then an anchor and deltas after it; somebody reads version 0
    for version in range(3):
        run.publish(version, weights(seed=version), delta={})
    run.publish(3, weights(seed=3), delta={})
    for version in range(4, 8):
        delta = {"model.safetensors.delta": bytes([version]) * 1500}
        run.publish(version, weights(), base=version - 1, delta=delta, whole=False)
    Pins(run.store, "demo").touch(0)

    prune(run.store, run="demo", keep_versions=2)

    left = {int(p.name) for p in (run.store / "demo" / "versions").iterdir()}
    assert left == {0, 3, 4, 5, 6, 7}
    needed = {digest for version in left for digest in stored(run, version).chunks()}
    assert {path.name for path in run.chunks()} == needed


def test_a_manifest_that_is_damaged_between_two_prunes_removes_nothing(run: Run) -> None:
    for version in range(3):
        run.publish(version, weights(seed=version))
    prune(run.store, run="demo", keep_versions=3)
    (run.store / "demo" / "versions" / "1" / "manifest.json").write_text("{}")
    before = tree(run.store)
    with pytest.raises(UserError, match="damaged"):
        prune(run.store, run="demo", keep_versions=1)
    assert tree(run.store) == before


def name_publishers(run: Run, *keys: SigningKey) -> None:
    """A new roles.json of the run that names these publishers."""
    named = {"publisher": [k.public_hex for k in keys], "coordinator": [], "validator": []}
    root = SigningKey.load(run.keys / "root.key")
    (run.keys / "roles.json").write_bytes(sign_roles(run.name, named, root, valid_s=1000))
