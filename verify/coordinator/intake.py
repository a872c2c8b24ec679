"""Receives uploads: streamed to disk, limited in size and time, stored as a whole or not at all."""

from __future__ import annotations

import asyncio
import os
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import BinaryIO

from blake3 import blake3

from runspec.core.errors import UserError
from runspec.core.files import write_atomic

UPLOAD_TIMEOUT_S = 600.0
_MAX_WORDS = 500
"""Characters of a refusal, which is logged and may repeat what a stranger sent."""
_TEMPORARY = ".tmp-"  # what runspec.core.files.remove_leftovers removes


class Refusal(Exception):
    """A request that is answered with an error: an HTTP status and words for the caller.

    Args:
        status: of HTTP.
        words: for the caller.
        retry_after_s: with 429, when it may come again.
    """

    def __init__(self, status: int, words: str, *, retry_after_s: float | None = None) -> None:
        self.status, self.words = status, words[:_MAX_WORDS]
        self.retry_after_s = retry_after_s
        super().__init__(self.words)


@asynccontextmanager
async def received(
    chunks: AsyncIterator[bytes], folder: Path, *, digest: str, size: int
) -> AsyncIterator[Path]:
    """Yields a temporary file in `folder` that holds the whole body, synced to disk.

    The block renames it into place; a file that is still there at its end is removed.

    Args:
        chunks: the body.
        folder: is made where there is none.
        digest: of the body.
        size: its bytes, no fewer either: room is kept for what was announced.

    Raises:
        Refusal: too large or small, too slow, not the bytes that `digest` names, or no room on the
            disk.
    """
    path = folder / f"{_TEMPORARY}{uuid.uuid4().hex}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with path.open("xb") as file:
            async with asyncio.timeout(UPLOAD_TIMEOUT_S):
                found, copied = await _copy(chunks, file, size)
            if copied < size:
                raise Refusal(400, f"the body has {copied} bytes, and {size} were announced")
            if found != digest:
                raise Refusal(400, f"the body's digest is {found}, not {digest}")
            await asyncio.to_thread(_sync, file)
        yield path
    except TimeoutError:
        raise Refusal(408, f"the body took longer than {UPLOAD_TIMEOUT_S:.0f} s") from None
    except OSError as error:
        raise Refusal(507, f"cannot store the file: {error.strerror or error}") from error
    finally:
        path.unlink(missing_ok=True)


def write_small(path: Path, data: bytes) -> None:
    """Writes an envelope, whole or not at all.

    Raises:
        Refusal: no room on the disk.
    """
    try:
        write_atomic(path, data)
    except UserError as error:
        raise Refusal(507, f"cannot store the file: {error.thing}") from error


async def to_the_end(work: Callable[[], None]) -> None:
    """Run `work` in a thread and return when it has ended, even if the caller is cancelled.

    `asyncio.to_thread` would leave the thread running, and it could write a file after its removal.
    """
    doing = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        await asyncio.shield(doing)
    except asyncio.CancelledError:
        await asyncio.wait([doing])
        raise


async def _copy(chunks: AsyncIterator[bytes], file: BinaryIO, max_bytes: int) -> tuple[str, int]:
    hasher, size = blake3(), 0
    async for chunk in chunks:
        size += len(chunk)
        if size > max_bytes:
            raise Refusal(413, f"larger than the {max_bytes} bytes allowed")
        hasher.update(chunk)
        file.write(chunk)
    return hasher.hexdigest(), size


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())
