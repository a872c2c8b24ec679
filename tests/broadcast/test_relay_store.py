"""A relay's disk: what goes when something else is to come, and that the bound always holds."""

from __future__ import annotations

import errno
import logging
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from broadcast.manifest import Chunk, ObjectInfo, WeightsManifest, sign_manifest
from broadcast.relay_store import RelayStore
from broadcast.transfers import Transfers
from runspec.core.errors import UserError
from runspec.core.hashing import digest_bytes
from runspec.core.keys import SigningKey

KEY = SigningKey.generate()
CHUNK = 2000
LOG = logging.getLogger("relay_store")


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


class Disk:
    """Stands in for a fetcher on a disk of so many bytes: chunks come, until it is full."""

    def __init__(self, folder: Path, size: int, *versions: int) -> None:
        self._folder, self._size = folder, size
        bodies = [body(version, number) for version in versions for number in range(10)]
        self._bodies = {digest_bytes(b): b for b in bodies}

    async def chunk(
        self, chunk: Chunk, what: str, deadline: float, *, into: Path, offset: int = 0
    ) -> None:
        if on_disk(self._folder) + chunk.size > self._size:
            raise OSError(errno.ENOSPC, "No space left on device")
        into.write_bytes(self._bodies[chunk.blake3])


def relay_store_of(folder: Path, max_bytes: int | None, keep_versions: int = 5) -> RelayStore:
    (folder / "demo").mkdir(exist_ok=True)
    return RelayStore(folder, "demo", keep_versions=keep_versions, max_bytes=max_bytes, log=LOG)


def put(relay_store: RelayStore, manifest: WeightsManifest) -> None:
    """Adopts a version and stores its chunks, or as many as there is room for."""
    relay_store.adopt(manifest, sign_manifest(manifest, KEY))
    relay_store.check_fits(manifest.version, manifest.chunks().values())
    bodies = {digest_bytes(b): b for b in (body(manifest.version, n) for n in range(10))}
    for chunk in manifest.chunks().values():
        with relay_store.new_chunk(chunk, manifest.version) as into:
            into.write_bytes(bodies[chunk.blake3])


def test_what_is_being_read_goes_last(tmp_path: Path) -> None:
    relay_store = relay_store_of(tmp_path, 22_000)
    put(relay_store, whole(0))
    put(relay_store, whole(1))
    relay_store.pins.touch(0)
    put(relay_store, whole(2))
    assert set(relay_store.manifests) == {0, 2}
    relay_store.pins.touch(2)
    put(relay_store, whole(3))  # all the others are being read; the newest must come all the same
    assert set(relay_store.manifests) == {2, 3}


def test_an_older_version_displaces_no_newer_one(tmp_path: Path) -> None:
    relay_store = relay_store_of(tmp_path, 22_000)
    put(relay_store, whole(4))
    put(relay_store, whole(5))
    with pytest.raises(UserError, match="version 2 does not fit"):
        put(relay_store, whole(2))
    assert {4, 5} <= set(relay_store.manifests)


def test_what_the_newest_is_rebuilt_from_makes_no_room_for_older_ones(tmp_path: Path) -> None:
    relay_store = relay_store_of(tmp_path, 24_000)
    for manifest in (whole(1), delta(2), delta(3)):
        put(relay_store, manifest)
    assert not relay_store.drop_one(2)
    assert set(relay_store.manifests) == {1, 2, 3}


def test_what_the_newest_is_rebuilt_from_goes_after_older_versions(tmp_path: Path) -> None:
    relay_store = relay_store_of(tmp_path, 21_000)
    put(relay_store, whole(0))
    for version in range(1, 5):
        put(relay_store, delta(version, base=0))
    assert set(relay_store.manifests) == {0, 3, 4}


def test_what_cannot_fit_makes_nothing_go(tmp_path: Path) -> None:
    relay_store = relay_store_of(tmp_path, 12_000)
    put(relay_store, whole(0))
    with pytest.raises(UserError, match=r"version 1 needs 1[0-9],\d{3} bytes here, 12,000 are"):
        put(relay_store, whole(1, chunks=9))
    assert 0 in relay_store.manifests and len(list((tmp_path / "demo/chunks").iterdir())) == 4


@settings(max_examples=60, deadline=None)
@given(
    steps=st.lists(
        st.tuples(st.integers(0, 12), st.booleans(), st.booleans()), min_size=1, max_size=15
    ),
    max_bytes=st.integers(3_000, 40_000),
    keep=st.integers(1, 4),
)
def test_the_bound_holds_whatever_comes(
    tmp_path_factory: pytest.TempPathFactory,
    steps: list[tuple[int, bool, bool]],
    max_bytes: int,
    keep: int,
) -> None:
    folder = tmp_path_factory.mktemp("relay_store")
    relay_store = relay_store_of(folder, max_bytes, keep)
    for version, anchor, read in steps:
        if version not in relay_store.manifests:
            with suppress(UserError):
                put(relay_store, whole(version) if anchor or version == 0 else delta(version))
        if read and version in relay_store.manifests:
            relay_store.pins.touch(version)
        assert on_disk(folder) <= max_bytes
        known = {digest for m in relay_store.manifests.values() for digest in m.chunks()}
        chunks = folder / "demo" / "chunks"
        here = {path.name for path in chunks.iterdir()} if chunks.exists() else set()
        assert here <= known, "nothing stays that no version needs"
    again = relay_store_of(folder, max_bytes, keep)
    again.recall({KEY.public_hex})
    assert again.manifests == relay_store.manifests


def test_a_smaller_bound_holds_from_the_start(tmp_path: Path) -> None:
    relay_store = relay_store_of(tmp_path, None)
    for version in range(4):
        put(relay_store, whole(version))
    again = relay_store_of(tmp_path, 12_000)
    again.recall({KEY.public_hex})
    assert set(again.manifests) == {3}
    assert on_disk(tmp_path) <= 12_000


def test_a_chunk_whose_versions_went_meanwhile_does_not_stay(tmp_path: Path) -> None:
    relay_store = relay_store_of(tmp_path, None, keep_versions=1)
    put(relay_store, whole(1))
    old, new = whole(1), whole(2)
    relay_store.adopt(new, sign_manifest(new, KEY))
    with relay_store.new_chunk(next(iter(old.chunks().values())), 1) as into:
        relay_store.prune(2)
        into.write_bytes(body(1, 0))
    assert list((tmp_path / "demo" / "chunks").iterdir()) == []


async def test_a_full_disk_lets_the_oldest_go(tmp_path: Path) -> None:
    # given a disk with room for two and a half versions, two of which are there
    relay_store = relay_store_of(tmp_path, None)
    for version in (0, 1):
        put(relay_store, whole(version))
    room = on_disk(tmp_path) + 5000
    said: list[str] = []
    fetcher = Disk(tmp_path, room, 0, 1, 2)
    transfers = Transfers(fetcher, relay_store, complain=lambda error: said.append(str(error)))  # type: ignore[arg-type]
    newest = whole(2)
    relay_store.adopt(newest, sign_manifest(newest, KEY))

    # when the third comes, then the oldest has gone for it
    await transfers.bring(newest.chunks().values())
    assert set(relay_store.manifests) == {1, 2} and not said
    assert all([await relay_store.has(digest) for v in (1, 2) for digest in whole(v).chunks()])
    assert on_disk(tmp_path) <= room
