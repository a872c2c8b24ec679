"""Disk of origin and relay: the manifests and chunks of one run; a relay's within a limit.

Pins: versions that were read recently, so that they are not pruned while a client reads them. A pin
is an empty file `<run>/pins/<version>`; its modification time is the time of the last read. The
origin, which serves the readers, writes the pins. The publisher, which prunes, reads them.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import shutil
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from broadcast import layout
from broadcast.disk import Identity, ProvenChunks, identity
from broadcast.manifest import MAX_BYTES, Chunk, WeightsManifest, open_manifest
from runspec.core.canonical import is_digest
from runspec.core.errors import UserError
from runspec.core.files import read_bounded, remove_leftovers, temporary_name, write_atomic
from runspec.core.signed import BadSignature

VALID_S = 600.0
"""Seconds for which a pin keeps a version."""
TOUCH_EVERY_S = 5.0
"""Shortest time between two writes of a pin, in seconds."""
MANIFESTS_EVERY_S = 1.0
"""Shortest time between two readings of the manifests folder, in seconds."""


class Pins:
    """The pins of one run in a store.

    Args:
        store: the store's directory.
        run: the run's id.
        clock: returns seconds since the epoch.
    """

    def __init__(self, store: Path, run: str, *, clock: Callable[[], float] = time.time) -> None:
        self._folder = store / run / "pins"
        self._clock = clock
        self._touched: dict[int, float] = {}

    def touch(self, version: int) -> None:
        """Pin a version that the store holds; do nothing if the disk is full."""
        now = self._clock()
        if 0 <= now - self._touched.get(version, 0.0) < TOUCH_EVERY_S:
            return
        self._touched[version] = now
        with suppress(OSError):
            self._folder.mkdir(parents=True, exist_ok=True)
            path = self._folder / str(version)
            path.touch()
            os.utime(path, (now, now))

    def newest_first(self) -> list[int]:
        """Return the pinned versions, the last read first."""
        now = self._clock()
        found = []
        for path in self._folder.glob("*"):
            with suppress(OSError):  # it was removed
                age = now - path.stat().st_mtime
                if path.name.isdecimal() and age < VALID_S:
                    found.append((age, int(path.name)))
        return [version for _, version in sorted(found)]

    def keep_only(self, versions: Iterable[int]) -> None:
        """Remove the pins of all other versions."""
        kept = set(versions)
        self._touched = {v: at for v, at in self._touched.items() if v in kept}
        for path in self._folder.glob("*"):
            if not (path.name.isdecimal() and int(path.name) in kept):
                path.unlink(missing_ok=True)


def versions_to_keep(
    needs: Mapping[int, int | None],
    newest: int,
    keep_versions: int,
    pinned: Sequence[int] = (),
) -> set[int]:
    """Return the versions to keep, so that a new client finds an anchor and all later deltas.

    These are the newest `keep_versions`, the newest anchor and all later versions, the
    `keep_versions` versions that were pinned last, and the chain of bases of each of these back to
    an anchor. Pins keep at most `keep_versions` chains, so a hostile reader cannot fill a disk.

    Args:
        needs: the base that each held version is rebuilt from; None for an anchor.
        newest: the version that latest.json names. Newer held versions are about to be announced:
            they are kept and not counted.
        keep_versions: number of newest versions to keep; at least 1.
        pinned: versions that are being read, the last read first.
    """
    announced = sorted((version for version in needs if version <= newest), reverse=True)
    wanted = {version for version in needs if version > newest} | set(announced[:keep_versions])
    whole = [version for version in announced if needs[version] is None]
    if whole:
        wanted |= {version for version in announced if version >= whole[0]}
    result = with_bases(wanted, needs)
    read = [version for version in pinned if version in needs and version not in result]
    return result | with_bases(read[:keep_versions], needs)


def with_bases(versions: Collection[int], needs: Mapping[int, int | None]) -> set[int]:
    """Return the versions and the held versions that they are rebuilt from."""
    found = set()
    for version in versions:
        step: int | None = version
        while step is not None and step in needs and step not in found:
            found.add(step)
            step = needs[step]
    return found


class StoredVersions:
    """The versions of a run in a store that another process writes.

    Args:
        store: the store's directory.
        run: the run's id.
        log: receives an error for each damaged manifest, once.
    """

    def __init__(self, store: Path, run: str, log: logging.Logger) -> None:
        self.store, self.run, self.log = store, run, log
        self.manifests: dict[int, WeightsManifest] = {}
        self.proven = ProvenChunks()
        self.pins = Pins(store, run)
        self.known: dict[str, tuple[Chunk, int]] = {}
        """Each chunk of the manifests by digest, and the newest version that needs it."""
        self._owners: dict[str, int] = {}
        """The version of each chunk that one version alone has: its readers read that version."""
        self._parsed: dict[int, tuple[Identity, WeightsManifest | None]] = {}
        self._looked_at = -math.inf
        self._looking = asyncio.Lock()

    async def current(self) -> Mapping[int, WeightsManifest]:
        """Return the manifests by version, as they were at most `MANIFESTS_EVERY_S` ago."""
        async with self._looking:
            if time.monotonic() - self._looked_at >= MANIFESTS_EVERY_S:
                await asyncio.to_thread(self._look)
                self._looked_at = time.monotonic()
        return self.manifests

    async def note_reader(self, digest: str) -> None:
        """Pin the version that the request for a chunk belongs to."""
        if digest not in self._owners:
            await self.current()
        if digest in self._owners:
            self.pins.touch(self._owners[digest])

    def manifest_path(self, version: int) -> Path:
        return self.store / layout.manifest_name(self.run, version)

    def chunk_path(self, digest: str) -> Path:
        return self.store / layout.chunk_name(self.run, digest)

    def _look(self) -> None:
        """Read the manifests again; one is parsed once while its file is the same."""
        parsed: dict[int, tuple[Identity, WeightsManifest | None]] = {}
        for version in layout.stored_versions(self.store, self.run):
            path = self.manifest_path(version)
            found, known = identity(path), self._parsed.get(version)
            if found is None:  # pruned since
                continue
            if known is not None and known[0] == found:
                parsed[version] = known
                continue
            try:
                data = read_bounded(path, MAX_BYTES)
                parsed[version] = found, open_manifest(data, run=self.run, publishers=None)
            except FileNotFoundError:
                continue
            except (BadSignature, UserError) as error:
                self.log.error("%s: damaged: %s", path, error)
                parsed[version] = found, None
        if parsed != self._parsed:
            self._parsed = parsed
            self.manifests = {v: manifest for v, (_, manifest) in parsed.items() if manifest}
            self._index()

    def _index(self) -> None:
        known: dict[str, tuple[Chunk, int]] = {}
        shared = set()
        for version in sorted(self.manifests):
            for digest, chunk in self.manifests[version].chunks().items():
                if digest in known:
                    shared.add(digest)
                known[digest] = (chunk, version)
        self.known = known
        self._owners = {d: version for d, (_, version) in known.items() if d not in shared}


class RelayStore(StoredVersions):
    """The versions that a relay holds; drops some when others need the room.

    A version may displace older versions only. Those that are being read (`pins`) and those that
    the newest is rebuilt from stay. The newest version may displace every other one, in this order:
    those that nobody needs, those that it is rebuilt from, those that are being read.

    Args:
        store: the relay's directory; what a killed relay left unfinished is removed.
        run: the run's id.
        keep_versions: number of newest versions that stay (`versions_to_keep`).
        max_bytes: limit on manifests and chunks together, incoming ones included; None: no limit.
        beside: store whose versions have a part of `max_bytes` before this one's.
        log: receives what is removed and why.
    """

    def __init__(
        self,
        store: Path,
        run: str,
        *,
        keep_versions: int,
        max_bytes: int | None,
        log: logging.Logger,
        beside: RelayStore | None = None,
    ) -> None:
        super().__init__(store, run, log)
        self.keep_versions, self._limit, self._beside = keep_versions, max_bytes, beside
        chunks = store / layout.chunks_name(run)
        for folder in (store / run, chunks):
            remove_leftovers(folder)
        self._chunk_bytes = {
            path.name: path.stat().st_size for path in chunks.glob("*") if is_digest(path.name)
        }
        """Sizes of the stored chunk files."""
        self._manifest_bytes = {
            version: self.manifest_path(version).stat().st_size
            for version in layout.stored_versions(store, run)
        }
        self._used = sum(self._chunk_bytes.values()) + sum(self._manifest_bytes.values())

    @property
    def _max_bytes(self) -> int | None:
        if self._limit is None or self._beside is None:
            return self._limit
        return max(0, self._limit - self._beside.needed_bytes)

    @property
    def needed_bytes(self) -> int:
        """Bytes of the manifests and their chunks, also of those that are still to come."""
        return sum(c.size for c, _ in self.known.values()) + sum(self._manifest_bytes.values())

    async def current(self) -> Mapping[int, WeightsManifest]:
        """Return the manifests by version; nobody else writes this store."""
        return self.manifests

    def believe(self, publishers: Collection[str]) -> None:
        """Load the versions on disk whose manifests one of these keys signed; drop all others."""
        dropped = []
        for version in self._manifest_bytes:
            path = self.manifest_path(version)
            try:
                data = read_bounded(path, MAX_BYTES)
                self.manifests[version] = open_manifest(data, run=self.run, publishers=publishers)
            except (BadSignature, OSError, UserError) as error:
                self.log.warning("%s: removed: %s", path, error)
                dropped.append(version)
        self._drop(dropped)
        self.trim()

    def trim(self) -> None:
        """Drop the oldest versions while all take more than `max_bytes`."""
        while self._max_bytes is not None and self._used > self._max_bytes and self.manifests:
            self._drop([min(self.manifests)])

    def adopt(self, manifest: WeightsManifest, data: bytes) -> None:
        """Store a checked manifest; from now on its chunks are known.

        Raises:
            UserError: it does not fit.
        """
        version = manifest.version
        self._make_room(len(data), version)
        write_atomic(self.manifest_path(version), data)
        self.manifests[version] = manifest
        self._manifest_bytes[version] = len(data)
        self._used += len(data)
        self._index()

    def shares(self) -> dict[int, float]:
        """Return the stored share of each version: 0.0 to 1.0 of its chunks' bytes."""
        found = {}
        for version, manifest in self.manifests.items():
            chunks = manifest.chunks()
            here = sum(self._chunk_bytes.get(digest, 0) for digest in chunks)
            total = sum(chunk.size for chunk in chunks.values())
            found[version] = here / total if total else 1.0
        return found

    async def has(self, digest: str) -> bool:
        """Whether a chunk is stored and correct; a damaged one is removed."""
        path = self.chunk_path(digest)
        if await self.proven.prove(path):
            return True
        if digest in self._chunk_bytes:
            self.log.warning("%s: damaged on disk, fetching it again", path)
            self._remove_chunk(digest)
        return False

    @contextmanager
    def new_chunk(self, chunk: Chunk, version: int) -> Iterator[Path]:
        """Yield an empty file for a chunk's checked bytes; it becomes the chunk at the end.

        Raises:
            UserError: there is no room for it, even after every version that may be dropped.
            OSError: it cannot be written.
        """
        self._make_room(chunk.size, version)
        path = self.chunk_path(chunk.blake3)
        temporary = temporary_name(path)
        self._used += chunk.size
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary.touch()
            yield temporary
            temporary.rename(path)
        except BaseException:
            self._used -= chunk.size
            temporary.unlink(missing_ok=True)
            raise
        self._chunk_bytes[chunk.blake3] = chunk.size
        self.proven.add(path)
        if chunk.blake3 not in self.known:  # its versions were dropped since
            self._remove_chunk(chunk.blake3)

    def check_fits(self, version: int, chunks: Iterable[Chunk]) -> None:
        """Check that these chunks fit all at once, before anything is dropped for them.

        Raises:
            UserError: they do not fit; nothing was dropped.
        """
        size = sum({chunk.blake3: chunk.size for chunk in chunks}.values())
        if self._max_bytes is not None and size + self._manifest_bytes[version] > self._max_bytes:
            raise UserError(
                f"version {version} needs {size:,} bytes here, {self._max_bytes:,} are allowed; "
                "older versions are served on",
                place=str(self.store / self.run),
                remedy="allow the relay more bytes",
            )

    def drop_one(self, version: int) -> bool:
        """Drop the version that this one displaces first; return False if it may displace none."""
        newest = max(self.manifests, default=version)
        others = sorted(v for v in self.manifests if v != version)
        pinned = self.pins.newest_first()[: self.keep_versions]
        needed = with_bases([newest], self._needs())
        if version >= newest:
            victims = sorted(others, key=lambda v: (v in pinned, v in needed, v))
        else:
            victims = [v for v in others if v < version and v not in needed and v not in pinned]
        if not victims:
            return False
        self.log.info("version %d goes: version %d needs the room", victims[0], version)
        self._drop(victims[:1])
        return True

    def prune(self, newest: int) -> None:
        """Drop the versions not to be kept; `newest` is the newest that is complete here."""
        pinned = self.pins.newest_first()
        remaining = versions_to_keep(self._needs(), newest, self.keep_versions, pinned)
        self._drop(self.manifests.keys() - remaining)
        self.pins.keep_only(remaining)

    def _needs(self) -> dict[int, int | None]:
        return {version: manifest.rebuilt_from for version, manifest in self.manifests.items()}

    def _make_room(self, size: int, version: int) -> None:
        while self._max_bytes is not None and self._used + size > self._max_bytes:
            if not self.drop_one(version):
                raise UserError(
                    f"version {version} does not fit: {self._used:,} of {self._max_bytes:,} bytes "
                    "are taken by newer versions and those that are being read",
                    place=str(self.store / self.run),
                    remedy="allow the relay more bytes, or let it keep fewer versions",
                )

    def _drop(self, versions: Iterable[int]) -> None:
        """Remove versions, manifests first, and the chunks that no other version needs."""
        for version in versions:
            shutil.rmtree(self.manifest_path(version).parent, ignore_errors=True)
            self.manifests.pop(version, None)
            self._used -= self._manifest_bytes.pop(version)
        self._index()
        for digest in self._chunk_bytes.keys() - self.known.keys():
            self._remove_chunk(digest)

    def _remove_chunk(self, digest: str) -> None:
        self.chunk_path(digest).unlink(missing_ok=True)
        self._used -= self._chunk_bytes.pop(digest)
