"""Long disk work that runs in threads, and the orderly end of such work."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from runspec.core.errors import UserError

T = TypeVar("T")
Identity = tuple[int, int, int]
"""Inode, size and time of the last change of a file."""
_COPY_STEP = 64 * 1024 * 1024
_NO_COPY_RANGE = {errno.ENOSYS, errno.EXDEV, errno.EINVAL, errno.EOPNOTSUPP}


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
