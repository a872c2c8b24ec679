"""Files on the disks of origin, relay and client: chunks, pins, copies, and work in threads.

Chunk files: each is named by the hash of its contents, and verified before it is served. No file is
synced. After a power cut some may be short or zeroed under their final names. So an origin or relay
hashes each file before it first serves it, and publishing a version again replaces damaged files.
Clients detect later damage by the hash of the chunk.

Pins: versions that were read recently, so that they are not pruned while a client reads them. A pin
is an empty file `<run>/pins/<version>`; its modification time is the time of the last read. The
origin, which serves the readers, writes the pins. The publisher, which prunes, reads them.
"""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from blake3 import blake3

from broadcast.manifest import Chunk, ObjectInfo, WeightsManifest
from runspec.core.canonical import digest_bytes
from runspec.core.errors import UserError
from runspec.core.files import temporary_name

T = TypeVar("T")
Identity = tuple[int, int, int]
"""Inode, size and time of the last change of a file."""
_COPY_STEP = 64 * 1024 * 1024
_NO_COPY_RANGE = {errno.ENOSYS, errno.EXDEV, errno.EINVAL, errno.EOPNOTSUPP}
_READ_BYTES = 1024 * 1024
_MAX_KNOWN = 2**18
VALID_S = 600.0
"""Seconds for which a pin keeps a version."""
TOUCH_EVERY_S = 5.0
"""Shortest time between two writes of a pin, in seconds."""


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


async def ended(work: asyncio.Future[Any]) -> None:
    """Wait until `work` has ended; a cancellation takes effect only then.

    A started thread continues to the end of its write. Until then it owns the file.
    """
    cancelled = False
    while not work.done():
        try:
            await asyncio.wait([work])
        except asyncio.CancelledError:
            cancelled = True
    with suppress(asyncio.CancelledError):
        work.exception()  # retrieved, or asyncio would log it
    if cancelled:
        raise asyncio.CancelledError


async def cancel_all(tasks: Iterable[asyncio.Future[Any]]) -> None:
    """Cancel tasks and wait until they have ended; their results and errors are dropped."""
    cancelled = list(tasks)
    for task in cancelled:
        task.cancel()
    await asyncio.gather(*cancelled, return_exceptions=True)


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

    def add(self, source: Path | memoryview) -> ObjectInfo:
        """Store the chunks of a file, or of bytes, and return the description of the whole.

        It reads a file once: this thread hashes the whole, another hashes and writes each chunk.

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
        target = self._folder / chunk.blake3
        if not _holds(target, data):
            self.new.append(target)
            _write(target, data)
        return chunk


@contextmanager
def new_chunks(folder: Path, chunk_bytes: int) -> Iterator[ChunkWriter]:
    """Yield a writer; if the block fails, remove its new chunks, so that a full disk recovers."""
    writer = ChunkWriter(folder, chunk_bytes)
    try:
        yield writer
    except BaseException:
        for path in writer.new:
            path.unlink(missing_ok=True)
        raise


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


def _pieces(source: Path | memoryview, size: int) -> Iterator[bytes | memoryview]:
    if isinstance(source, memoryview):
        yield from (source[start : start + size] for start in range(0, len(source), size))
        return
    with source.open("rb") as file:
        while data := file.read(size):
            yield data


def _holds(path: Path, data: bytes | memoryview) -> bool:
    try:
        with path.open("rb") as file:
            # A memoryview compares element by element, which is slow: compare bytes.
            return os.fstat(file.fileno()).st_size == len(data) and file.read() == bytes(data)
    except FileNotFoundError:
        return False


def _write(path: Path, data: bytes | memoryview) -> None:
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


def owners(manifests: Iterable[WeightsManifest]) -> dict[str, int]:
    """Return the version of each chunk that belongs to one version only.

    A request for such a chunk shows which version its client reads. Shared chunks do not.
    """
    owner: dict[str, int] = {}
    shared = set()
    for manifest in manifests:
        for digest in manifest.chunks():
            if digest in owner:
                shared.add(digest)
            owner[digest] = manifest.version
    return {digest: version for digest, version in owner.items() if digest not in shared}
