"""Chunk files: each is named by the hash of its contents, and verified before it is served.

No file is synced. After a power cut some may be short or zeroed under their final names. So an
origin or relay hashes each file before it first serves it, and publishing a version again replaces
damaged files. Clients detect later damage by the hash of the chunk.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from blake3 import blake3

from broadcast.disk import Identity, identity
from broadcast.manifest import Chunk, ObjectInfo
from runspec.core.errors import UserError
from runspec.core.files import temporary_name
from runspec.core.hashing import digest_bytes

_READ_BYTES = 1024 * 1024
_MAX_KNOWN = 2**18


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
