"""Receives uploads: streamed to disk, limited in size and time, stored as a whole or not at all."""

from __future__ import annotations

import asyncio
import os
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import BinaryIO

from blake3 import blake3

from runspec.core.errors import UserError
from runspec.core.files import write_atomic

UPLOAD_TIMEOUT_S = 600.0
_MAX_WORDS = 500
"""Largest number of characters of a refusal; it may repeat what a stranger sent."""
_TEMPORARY = ".tmp-"  # what runspec.core.files.remove_leftovers removes


class Refusal(Exception):
    """Raised to answer a request with an error.

    Args:
        status: status of HTTP.
        words: the error's text for the caller.
        retry_after_s: seconds after which the caller may try again, with 429 and 503.
    """

    def __init__(self, status: int, words: str, *, retry_after_s: float | None = None) -> None:
        self.status, self.words = status, words[:_MAX_WORDS]
        self.retry_after_s = retry_after_s
        super().__init__(self.words)


@contextmanager
def refusing(status: int, *errors: type[Exception], what: str = "") -> Iterator[None]:
    """Raise errors of the block as a `Refusal`.

    Args:
        status: status of HTTP.
        errors: classes of the errors.
        what: words before those of the error.
    """
    try:
        yield
    except errors as error:
        raise Refusal(status, f"{what}{error}") from error


@asynccontextmanager
async def received(
    chunks: AsyncIterator[bytes], folder: Path, *, digest: str, size: int
) -> AsyncIterator[Path]:
    """Yield a temporary file in `folder` that holds the whole body, synced to disk.

    The block renames the file. A file that still has its temporary name at the end is removed.

    Args:
        chunks: the body.
        folder: where the file lies; it is made if it does not exist.
        digest: BLAKE3 of the body.
        size: bytes of the body, exactly.

    Raises:
        Refusal: the body is too large, too small, too slow, or has another digest; or the disk has
            no room.
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
            file.flush()
            await asyncio.to_thread(os.fsync, file.fileno())
        yield path
    except TimeoutError:
        raise Refusal(408, f"the body took longer than {UPLOAD_TIMEOUT_S:.0f} s") from None
    except OSError as error:
        raise Refusal(507, f"cannot store the file: {error.strerror or error}") from error
    finally:
        path.unlink(missing_ok=True)


def write_small(path: Path, data: bytes) -> None:
    """Write an envelope, whole or not at all.

    Raises:
        Refusal: the disk has no room.
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
