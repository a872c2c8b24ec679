"""Files that appear whole or not at all, and reads with a bound."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from runspec.core.errors import UserError
from runspec.core.object_store import Folder, ObjectPath

FULL = (errno.ENOSPC, errno.EDQUOT)
"""Errors of a disk, or of a user's share of one, that is full."""
_TEMPORARY = ".tmp-"
_REMEDY = "free disk space or mend the permissions, then start again"


def expand_user(path: Path) -> Path:
    """`~` as the folder that it stands for; as it is where there is no such user."""
    try:
        return path.expanduser()
    except RuntimeError:
        return path


def temporary_name(path: Path) -> Path:
    """A name beside `path` for what becomes it; `remove_leftovers` knows it."""
    return path.with_name(f"{_TEMPORARY}{uuid.uuid4().hex}-{path.name}")


@contextmanager
def atomic_file(path: Path, *, mode: int = 0o666, remedy: str = _REMEDY) -> Iterator[BinaryIO]:
    """Yields a file under a temporary name, open for writing; it is synced and becomes `path` by
    one rename when the block succeeds, and is removed when it does not.

    Args:
        path: what the file becomes.
        mode: permissions, of which the umask takes its part.
        remedy: what a person can do where it cannot be written.

    Raises:
        UserError: it cannot be written; what was there before is still there.
    """
    temporary = temporary_name(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with os.fdopen(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(path)
    except OSError as error:
        raise UserError(
            f"cannot write: {error.strerror or error}", place=str(path), remedy=remedy
        ) from error
    finally:
        with suppress(OSError):  # nothing is there any more where all went well
            temporary.unlink()


def require_writable(folder: Folder, what: str, remedy: str) -> None:
    """Makes a folder where it is missing, and a file in it, which goes again.

    Args:
        folder: the folder.
        what: what it is, for people.
        remedy: what a person can do where it cannot be written.

    Raises:
        UserError: it cannot be made or written; the message has the reason.
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
    """Writes the whole of a file, see `atomic_file`; or of an object of a store."""
    if isinstance(path, ObjectPath):
        path.write(data)
        return
    with atomic_file(path, mode=mode) as file:
        file.write(data)


def sync_folder(folder: Path) -> None:
    """Puts on the disk what was renamed into a folder: a loss of power may take it back before."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def new_directory(path: Path) -> Iterator[Path]:
    """Yields a temporary directory that becomes `path` by one rename when the block succeeds.

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
    """Removes what `atomic_file` and `new_directory` of a killed process left in `folder`."""
    for entry in folder.glob(f"{_TEMPORARY}*"):
        if entry.is_dir():
            shutil.rmtree(entry, ignore_errors=True)
        else:
            entry.unlink(missing_ok=True)


def read_bounded(path: Folder, max_bytes: int) -> bytes:
    """Reads a whole file, refusing one larger than `max_bytes` before reading it."""
    if isinstance(path, ObjectPath):
        return path.read(max_bytes)
    with path.open("rb") as file:
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise UserError(f"larger than the {max_bytes} bytes allowed", place=str(path))
    return data
