"""Atomic writes of files and directories, and reads with a size limit."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from runspec.core.canonical import parse_object
from runspec.core.errors import UserError
from runspec.core.object_store import Folder, ObjectPath

FULL = (errno.ENOSPC, errno.EDQUOT)
"""Error numbers of a full disk or an exhausted quota."""
_TEMPORARY = ".tmp-"
_LOCK_POLL_S = 0.02
_REMEDY = "free disk space or mend the permissions, then start again"


def expand_user(path: Path) -> Path:
    """Expand `~`; return the path unchanged if there is no such user."""
    try:
        return path.expanduser()
    except RuntimeError:
        return path


def temporary_name(path: Path) -> Path:
    """Return a temporary name beside `path`, which `remove_leftovers` recognises."""
    return path.with_name(f"{_TEMPORARY}{uuid.uuid4().hex}-{path.name}")


@contextmanager
def atomic_file(
    path: Path,
    *,
    mode: int = 0o666,
    overwrite: bool = True,
    what: str = "",
    remedy: str = _REMEDY,
) -> Iterator[BinaryIO]:
    """Yield a temporary file, open for writing.

    If the block succeeds, the file is synced and renamed to `path`; else it is removed.

    Args:
        path: final path of the file.
        mode: permissions, less the umask.
        overwrite: whether the file may exist already.
        what: description of the file in the error message.
        remedy: remedy of the error message.

    Raises:
        FileExistsError: the file exists, and `overwrite` is false.
        UserError: the file cannot be written; a file that existed is unchanged.
    """
    temporary = temporary_name(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with os.fdopen(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        if overwrite:
            temporary.rename(path)
        else:
            os.link(temporary, path)
    except OSError as error:
        if not overwrite and isinstance(error, FileExistsError) and path.exists():
            raise
        raise UserError(
            f"cannot write{what and f' {what}'}: {error.strerror or error}",
            place=str(path),
            remedy=remedy,
        ) from error
    finally:
        with suppress(OSError):  # after the rename the name is gone
            temporary.unlink()


def require_writable(folder: Folder, what: str, remedy: str) -> None:
    """Create a folder if it is missing, and test that a file can be written in it.

    Args:
        folder: the folder.
        what: its description in the error message.
        remedy: remedy of the error message.

    Raises:
        UserError: it cannot be created or written; the message has the reason.
    """
    if isinstance(folder, ObjectPath):
        mark = folder / temporary_name(Path("writable")).name
        mark.write(b"")
        mark.unlink()
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, prefix=_TEMPORARY):
            pass
    except OSError as error:
        reason = error.strerror or str(error)
        if isinstance(error, FileExistsError):
            reason = "Not a directory: a file is there"
        raise UserError(
            f"{what} cannot be written: {reason}", place=str(folder), remedy=remedy
        ) from error


def write_atomic(path: Folder, data: bytes, *, mode: int = 0o666) -> None:
    """Write a file atomically, see `atomic_file`; or an object of a store."""
    if isinstance(path, ObjectPath):
        path.write(data)
        return
    with atomic_file(path, mode=mode) as file:
        file.write(data)


def open_lock(path: Path) -> int:
    """Open a lock file, and make it if there is none. Other users cannot open it, and so not hold
    the lock, wherever the folder lies."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    if os.fstat(descriptor).st_uid == os.getuid():
        os.fchmod(descriptor, 0o600)
    return descriptor


def open_folder_lock(folder: Path) -> int:
    """Open the lock file of a folder, see `open_lock`.

    Raises:
        UserError: it cannot be opened.
    """
    try:
        return open_lock(folder / ".lock")
    except OSError as error:
        raise UserError(
            f"cannot be locked: {error.strerror}",
            place=str(folder),
            remedy="mend the permissions, or name a folder of this user's",
        ) from error


@contextmanager
def locked(
    descriptor: int, deadline_s: float, held: UserError, waiting: Callable[[], None] | None = None
) -> Iterator[None]:
    """Hold the exclusive lock of an open file, and close the file at the end.

    A killed process releases its lock. The thread sleeps while another process holds it.

    Args:
        descriptor: the open file or folder.
        deadline_s: seconds to wait for another holder.
        held: raised after them.
        waiting: called once if there is another holder.
    """
    try:
        end = time.monotonic() + deadline_s
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > end:
                    raise held from None
                if waiting is not None:
                    waiting()
                    waiting = None
                time.sleep(_LOCK_POLL_S)
        yield
    finally:
        os.close(descriptor)


def sync_folder(folder: Path) -> None:
    """Sync a folder, so that a loss of power cannot undo a rename into it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def new_directory(path: Path) -> Iterator[Path]:
    """Yield a temporary directory that is renamed to `path` if the block succeeds.

    Raises:
        FileExistsError: `path` exists already.
    """
    if path.exists():
        raise FileExistsError(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary_name(path)
    temporary.mkdir()
    try:
        yield temporary
        temporary.rename(path)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def remove_leftovers(folder: Path) -> None:
    """Remove temporary files and directories that a killed process left in `folder`."""
    for entry in folder.glob(f"{_TEMPORARY}*"):
        if entry.is_dir():
            shutil.rmtree(entry, ignore_errors=True)
        else:
            entry.unlink(missing_ok=True)


def read_bounded(path: Folder, max_bytes: int) -> bytes:
    """Read a whole file of at most `max_bytes`.

    Raises:
        UserError: it is larger.
    """
    if isinstance(path, ObjectPath):
        return path.read(max_bytes)
    with path.open("rb") as file:
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise UserError(f"larger than the {max_bytes} bytes allowed", place=str(path))
    return data


def read_object(path: Folder, max_bytes: int) -> dict[str, Any]:
    """Read a JSON object from a file of at most `max_bytes`.

    Raises:
        UserError: the file is larger.
        MalformedJson: it is not such an object, see `parse_object`.
    """
    return parse_object(read_bounded(path, max_bytes), max_bytes=max_bytes)


def read_json(path: Path, max_bytes: int, what: str, *, remedy: str = "", place: str = "") -> Any:
    """Read a JSON object that another program wrote, a dict.

    Args:
        path: the file.
        max_bytes: its largest size.
        what: its description in the error message.
        remedy: remedy of the error message.
        place: of the error message; the path if empty.

    Raises:
        UserError: it cannot be read, is larger, or is not a JSON object.
    """
    try:
        found = json.loads(read_bounded(path, max_bytes))
        if not isinstance(found, dict):
            raise ValueError("not a JSON object")
    except (OSError, ValueError, RecursionError) as error:
        where = place or str(path)
        raise UserError(f"cannot read {what}: {error}", place=where, remedy=remedy) from error
    return found
