"""Work on the disk that takes long: in a thread, between two steps of which it can be ended."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from runspec.core.errors import UserError

T = TypeVar("T")
Identity = tuple[int, int, int]
"""Of a file: inode, size, time of its last change."""
_COPY_STEP = 64 * 1024 * 1024
_NO_COPY_RANGE = {errno.ENOSYS, errno.EXDEV, errno.EINVAL, errno.EOPNOTSUPP}


class Patience:
    """Ends disk work between two steps of it: at the deadline, or when nobody wants it any more."""

    def __init__(self, deadline: float) -> None:
        self._deadline = deadline
        self.over = False

    def check(self, work: str, place: Path) -> None:
        if self.over or time.monotonic() > self._deadline:
            raise UserError(
                f"the time was up while {work}",
                place=str(place),
                remedy="allow more time: the next fetch goes on from here",
            )


async def in_thread(work: Callable[[], T], patience: Patience) -> T:
    """Runs disk work beside the event loop, and is never outlived by it.

    A cancelled call ends the work at its next step and waits for that: whoever comes next must
    find files that nobody else is changing.
    """
    running = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        patience.over = True
        await ended(running)
        raise


async def ended(work: asyncio.Future[Any]) -> None:
    """Waits until `work` has ended, and is cancelled only then.

    A thread that was started goes on to the end of its write. Until then the file is its own.
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


def copy_file(source: Path, target: Path, patience: Patience) -> None:
    """Copies a file's bytes inside the kernel; a file system that can shares the blocks."""
    try:
        with source.open("rb") as old, target.open("wb") as new:
            size, done = os.fstat(old.fileno()).st_size, 0
            while done < size:
                patience.check(f"copying {source}", target)
                step = min(_COPY_STEP, size - done)
                copied = os.copy_file_range(old.fileno(), new.fileno(), step, done, done)
                if copied == 0:
                    break  # it became shorter; whoever checks the copy will say so
                done += copied
    except AttributeError:  # not on Linux
        shutil.copyfile(source, target)
    except OSError as error:
        if error.errno not in _NO_COPY_RANGE:
            raise
        shutil.copyfile(source, target)


def identity(path: Path) -> Identity | None:
    """What is another when a file is replaced or written; None where there is no file."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns


def allocated(path: Path) -> int:
    """Bytes that a file takes on its disk, holes left out; 0 where there is none."""
    try:
        return path.stat().st_blocks * 512
    except FileNotFoundError:
        return 0
