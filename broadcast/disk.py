"""Files on disks of origin, relay and client: chunks, copies, fetched versions, work in threads.

Chunk files: each is named by the hash of its contents, and verified before it is served. No file is
synced. After a power cut some may be short or zeroed under their final names. So an origin or relay
hashes each file before it first serves it, and publishing a version again replaces damaged files.
Clients detect later damage by the hash of the chunk.

`Cache`, the folder of the versions that a client has fetched:

    CACHE/v<N>/           a complete, checked version: its files and manifest.json
    CACHE/.partial-v<N>/  an incomplete version; one rename makes it v<N>
    CACHE/.deltas-v<N>/   deltas to apply to the incomplete version
    CACHE/.lock-v<N>      flock: exclusive to make or remove the version, shared to read it

The locks work between threads, clients and processes. A killed process releases its locks.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from blake3 import blake3

from broadcast.manifest import (
    FILE_NAME,
    MAX_BYTES,
    Chunk,
    ObjectInfo,
    WeightsManifest,
    open_manifest,
)
from broadcast.transport import ended
from runspec.core.canonical import digest_bytes
from runspec.core.errors import UserError
from runspec.core.files import open_lock, read_bounded, temporary_name
from runspec.core.signed import BadSignature

T = TypeVar("T")
Identity = tuple[int, int, int]
"""Inode, size and time of the last change of a file."""
_COPY_STEP = 64 * 1024 * 1024
_NO_COPY_RANGE = {errno.ENOSYS, errno.EXDEV, errno.EINVAL, errno.EOPNOTSUPP}
_READ_BYTES = 1024 * 1024
_MAX_KNOWN = 2**18


class Cancellation:
    """Ends disk work between two of its steps: at the deadline, or once `cancelled` is set."""

    def __init__(self, deadline: float) -> None:
        self.deadline = deadline
        self.cancelled = False

    def check(self, work: str, place: Path) -> None:
        """Raise a UserError if the work has to end."""
        if self.cancelled or time.monotonic() > self.deadline:
            raise UserError(
                f"the time was up while {work}",
                place=str(place),
                remedy="allow more time: the next fetch goes on from here",
            )


async def in_thread(work: Callable[[], T], cancellation: Cancellation) -> T:
    """Run disk work beside the event loop; return only after the work has ended.

    A cancelled call ends the work at its next step and waits for that, so that the next user of the
    files finds them unchanged by others.
    """
    running = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        cancellation.cancelled = True
        await ended(running)
        raise


def copy_file(source: Path, target: Path, cancellation: Cancellation) -> None:
    """Copy a file inside the kernel; file systems that can share the blocks."""
    try:
        with source.open("rb") as old, target.open("wb") as new:
            size, done = os.fstat(old.fileno()).st_size, 0
            while done < size:
                cancellation.check(f"copying {source}", target)
                step = min(_COPY_STEP, size - done)
                copied = os.copy_file_range(old.fileno(), new.fileno(), step, done, done)
                if copied == 0:
                    break  # it became shorter; the check of the copy reports it
                done += copied
    except AttributeError:  # not on Linux
        shutil.copyfile(source, target)
    except OSError as error:
        if error.errno not in _NO_COPY_RANGE:
            raise
        shutil.copyfile(source, target)


def identity(path: Path) -> Identity | None:
    """Return a value that changes when a file is replaced or written; None if there is no file."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns


def allocated(path: Path) -> int:
    """Return the bytes that a file takes on its disk, without holes; 0 if there is none."""
    try:
        return path.stat().st_blocks * 512
    except FileNotFoundError:
        return 0


class ChunkWriter:
    """Cuts files into chunks and stores them in a folder.

    Args:
        folder: folder of the chunks; created when needed.
        chunk_bytes: size of a chunk.
    """

    def __init__(self, folder: Path, chunk_bytes: int) -> None:
        self._folder, self._chunk_bytes = folder, chunk_bytes
        self.new: list[Path] = []
        """Chunks that this writer wrote: they were missing or damaged."""

    def add(self, source: Path | memoryview | Iterator[bytes]) -> ObjectInfo:
        """Store the chunks of a file, or of bytes, and return the description of the whole.

        It reads once: this thread hashes the whole, another hashes and writes each chunk.

        Raises:
            UserError: a chunk cannot be written.
        """
        whole = blake3()
        chunks = []
        with ThreadPoolExecutor(1) as beside:
            for data in _pieces(source, self._chunk_bytes):
                stored = beside.submit(self._put, data)
                whole.update(data)
                chunks.append(stored.result())
        return ObjectInfo(sum(c.size for c in chunks), whole.hexdigest(), tuple(chunks))

    def _put(self, data: bytes | memoryview) -> Chunk:
        chunk = Chunk(digest_bytes(data), len(data))
        path = self._folder / chunk.blake3
        with suppress(FileNotFoundError), path.open("rb") as file:
            # A memoryview compares element by element, which is slow: compare bytes.
            if os.fstat(file.fileno()).st_size == len(data) and file.read() == bytes(data):
                return chunk
        self.new.append(path)
        temporary = temporary_name(path)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_bytes(data)
            temporary.rename(path)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            raise UserError(
                f"cannot store a chunk: {error.strerror or error}",
                place=str(path),
                remedy="free disk space or mend the permissions, then publish again",
            ) from error
        return chunk


class ProvenChunks:
    """Chunk files that this process has verified, with the result.

    A file is identified by inode, size and time of the last change. A changed file is hashed again.
    """

    def __init__(self) -> None:
        self._known: dict[Path, tuple[Identity, bool]] = {}
        self._hashing: dict[Path, asyncio.Task[bool]] = {}

    def __contains__(self, path: Path) -> bool:
        """Return whether the file exists and was found correct."""
        return self._verdict(path) is True

    def add(self, path: Path) -> None:
        """Mark a file as correct: the caller checked every byte that it wrote into it."""
        found = identity(path)
        if found is not None:
            self._note(path, found, True)

    async def prove(self, path: Path) -> bool:
        """Return whether the file exists and is correct; concurrent calls share one hashing."""
        verdict = self._verdict(path)
        if verdict is not None:
            return verdict
        if path not in self._hashing:
            task = asyncio.create_task(self._hash(path))
            self._hashing[path] = task
            task.add_done_callback(lambda done: self._hashing.pop(path))
        return await asyncio.shield(self._hashing[path])

    def _verdict(self, path: Path) -> bool | None:
        """Return whether a file is correct; None if it must be hashed."""
        found = identity(path)
        if found is None:
            return False
        known = self._known.get(path)
        return known[1] if known is not None and known[0] == found else None

    async def _hash(self, path: Path) -> bool:
        found = identity(path)
        digest = await asyncio.to_thread(_digest, path)
        right = digest == path.name
        # A read error may be temporary, such as too many open files: it is no result to keep.
        if found is not None and digest is not None:
            self._note(path, found, right)
        return right

    def _note(self, path: Path, found: Identity, right: bool) -> None:
        if len(self._known) >= _MAX_KNOWN:  # files that are still served are hashed once more
            self._known.clear()
        self._known[path] = (found, right)


def _digest(path: Path) -> str | None:
    """Return the BLAKE3 of a file; None if it cannot be read.

    The file is not mapped: a read error of the disk would then kill the process (SIGBUS).
    """
    hasher = blake3()
    buffer = bytearray(_READ_BYTES)
    view = memoryview(buffer)
    try:
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(buffer):
                hasher.update(view[:count])
    except OSError:
        return None
    return hasher.hexdigest()


def _pieces(source: Path | memoryview | Iterator[bytes], size: int) -> Iterator[bytes | memoryview]:
    if isinstance(source, memoryview):
        yield from (source[start : start + size] for start in range(0, len(source), size))
        return
    if not isinstance(source, Path):
        held = bytearray()
        for piece in source:
            held += piece
            while len(held) >= size:
                yield bytes(held[:size])
                del held[:size]
        yield from [bytes(held)] if held else []
        return
    with source.open("rb") as file:
        while data := file.read(size):
            yield data


PARTIAL = ".partial-"
DELTAS = ".deltas-"
_LOCK = ".lock-"
_REMOVED = ".removed-"
_LOOK_EVERY_S = 0.02


class Cache:
    """Folder of versions of one run.

    Raises:
        UserError: it cannot be created or written.
    """

    def __init__(self, folder: Path, *, run: str) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _unusable(folder, error) from error
        self.folder = folder
        self._run = run
        self._holds: dict[int, ExitStack] = {}
        """Shared locks of versions, until `release`."""
        self._sweep()

    def whole(self, version: int) -> Path:
        return self.folder / f"v{version}"

    def partial(self, version: int) -> Path:
        return self.folder / f"{PARTIAL}v{version}"

    def deltas(self, version: int) -> Path:
        return self.folder / f"{DELTAS}v{version}"

    def digest(self, version: int) -> str | None:
        """Return the manifest digest of a complete version; None if it is not here.

        Its bytes were checked when they were fetched.

        Raises:
            UserError: the folder is not a version of the run.
        """
        whole = self.whole(version)
        if not whole.exists():
            return None
        try:
            return digest_bytes(self._read(version)[0])
        except (OSError, BadSignature) as error:
            reason = error.strerror if isinstance(error, OSError) else None
            raise UserError(
                f"exists, and is no version that was fetched: {reason or error}",
                place=str(whole),
                remedy="remove it, or name another directory",
            ) from error

    async def wait(self, version: int, deadline: float) -> None:
        """Wait a moment for those who have a version locked.

        Raises:
            UserError: the deadline has passed.
        """
        if time.monotonic() > deadline:
            raise UserError(
                f"version {version} is still being fetched, copied or used by someone else",
                place=str(self._lock_path(version)),
                remedy="wait for that one, end it, or fetch into another directory",
            )
        await asyncio.sleep(_LOOK_EVERY_S)

    @contextmanager
    def reading(self) -> Iterator[dict[int, WeightsManifest]]:
        """Yield the complete versions; none of them is removed during the block."""
        with ExitStack() as stack:
            locks = {v: self.locked(v, fcntl.LOCK_SH) for v in self._numbers("v")}
            held = [v for v, lock in locks.items() if stack.enter_context(lock)]
            yield {v: manifest for v in held if (manifest := self._manifest(v)) is not None}

    def hold(self, version: int) -> bool:
        """Keep a version from being removed until `release`, also by other processes.

        Return False if someone makes or removes it now.
        """
        if version not in self._holds:
            with ExitStack() as stack:
                if not stack.enter_context(self.locked(version, fcntl.LOCK_SH)):
                    return False
                self._holds[version] = stack.pop_all()
        return True

    def release(self, version: int) -> None:
        """End a `hold`, if there is one."""
        self._holds.pop(version, ExitStack()).close()

    def close(self) -> None:
        """Release all versions."""
        for version in list(self._holds):
            self.release(version)

    @contextmanager
    def locked(self, version: int, mode: int = fcntl.LOCK_EX) -> Iterator[bool]:
        """Try to lock a version without waiting; yield whether it worked.

        Args:
            version: its number.
            mode: LOCK_EX to make or remove it, LOCK_SH to read it.

        Raises:
            UserError: the lock file cannot be created.
        """
        path = self._lock_path(version)
        try:
            descriptor = open_lock(path)
        except OSError as error:
            raise _unusable(path, error) from error
        try:
            held = False
            with suppress(BlockingIOError, FileNotFoundError):
                fcntl.flock(descriptor, mode | fcntl.LOCK_NB)
                held = path.stat().st_ino == os.fstat(descriptor).st_ino  # else it was unlinked
            yield held
        finally:
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # a forked child may hold a copy of it
            os.close(descriptor)

    def unfinished(self) -> list[int]:
        """Return the versions that are being fetched, or whose fetch did not finish."""
        return self._numbers(f"{PARTIAL}v")

    def remove(self, version: int) -> None:
        """Remove a version, whose exclusive lock the caller holds.

        It is renamed first, so that no half-removed version has its name.
        """
        for path in (self.whole(version), self.partial(version), self.deltas(version)):
            if path.exists():
                path.rename(self.folder / f"{_REMOVED}{uuid.uuid4().hex}")
        self._sweep()

    def prune(self, keep: set[int]) -> None:
        """Release all other versions, and remove those that nobody makes, reads or holds."""
        for version in self._holds.keys() - keep:
            self.release(version)
        self._sweep()
        forms = ("v", f"{PARTIAL}v", f"{DELTAS}v", f"{_LOCK}v")
        found = {number for form in forms for number in self._numbers(form)}
        for version in found - keep:
            with self.locked(version) as mine:
                if mine:
                    self.remove(version)
                    self._lock_path(version).unlink()

    def _sweep(self) -> None:
        """Remove renamed versions and applied deltas, also those that a killed process left."""
        used_up = [n for n in self._numbers(f"{DELTAS}v") if self.whole(n).exists()]
        for path in [*self.folder.glob(f"{_REMOVED}*"), *map(self.deltas, used_up)]:
            shutil.rmtree(path, ignore_errors=True)

    def _numbers(self, form: str) -> list[int]:
        texts = (path.name.removeprefix(form) for path in self.folder.glob(f"{form}*"))
        return sorted(int(text) for text in texts if text.isascii() and text.isdecimal())

    def _manifest(self, version: int) -> WeightsManifest | None:
        try:
            _, manifest = self._read(version)
        except (BadSignature, UserError, OSError):
            return None  # of another run, or not a fetched version: useless as a base
        return manifest if manifest.version == version else None

    def _read(self, version: int) -> tuple[bytes, WeightsManifest]:
        data = read_bounded(self.whole(version) / FILE_NAME, MAX_BYTES)
        return data, open_manifest(data, run=self._run, publishers=None)

    def _lock_path(self, version: int) -> Path:
        return self.folder / f"{_LOCK}v{version}"


def _unusable(path: Path, error: OSError) -> UserError:
    return UserError(
        f"cannot write: {error.strerror or error}",
        place=str(path),
        remedy="mend the permissions, or name another directory",
    )
