"""Atomic writes of files and directories, reads with a size limit, and folders of object stores.

TensorStore's drivers read and write the folders of an object store (s3://, gs://).

An object store has no rename. So an entry `<folder>/<name>/...` becomes valid by a marker, the
object `<folder>/whole/<name>`, which is written last and removed first. An entry without a marker
is unfinished: it is not listed, and its writer removes it at the next start.

Credentials and endpoints come from the environment: for s3:// AWS_ACCESS_KEY_ID,
AWS_SECRET_ACCESS_KEY, AWS_SESSION_TOKEN, AWS_REGION or AWS_DEFAULT_REGION, AWS_ENDPOINT_URL_S3 or
AWS_ENDPOINT_URL; for gs:// GOOGLE_APPLICATION_CREDENTIALS.
"""

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
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from runspec.core.canonical import parse_object
from runspec.core.entry_points import install_command
from runspec.core.errors import UserError

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


DEADLINE_S = 60.0
"""Seconds that one small request may take, with its retries."""
RETRIES: dict[str, int | str] = {"max_retries": 5, "initial_delay": "200ms", "max_delay": "2s"}
_DRIVERS = {"s3": "s3", "gs": "gcs"}
_MARKERS = "whole"
_STORE_REMEDY = (
    "see that the bucket exists and that this machine reaches the store; endpoint, region and "
    "credentials come from the environment (AWS_ENDPOINT_URL, AWS_REGION, AWS_ACCESS_KEY_ID, "
    "AWS_SECRET_ACCESS_KEY; GOOGLE_APPLICATION_CREDENTIALS)"
)


@dataclass(frozen=True)
class ObjectPath:
    """Folder or object of a store; methods like those of pathlib have the same names.

    Methods that use the store raise a UserError if it fails.
    """

    url: str
    """scheme://bucket/key, without a final slash."""

    def __str__(self) -> str:
        return self.url

    def __truediv__(self, name: str) -> ObjectPath:
        return ObjectPath(f"{self.url}/{name}")

    @property
    def name(self) -> str:
        return self.url.rpartition("/")[2]

    @property
    def parent(self) -> ObjectPath:
        return ObjectPath(self.url.rpartition("/")[0])

    @property
    def marker(self) -> ObjectPath:
        """Object that makes this entry of its folder valid."""
        return self.parent / _MARKERS / self.name

    def kvstore(self, end: str = "/") -> dict[str, Any]:
        """Returns TensorStore's spec of the keys that begin with this path and `end`."""
        scheme, _, path = self.url.partition("://")
        bucket, _, key = path.partition("/")
        driver = _DRIVERS[scheme]
        spec = {"driver": driver, "bucket": bucket, "path": f"{key}{end}"}
        context: dict[str, Any] = {f"{driver}_request_retries": RETRIES}
        if driver == "s3":
            env = os.environ
            found = {
                "endpoint": env.get("AWS_ENDPOINT_URL_S3") or env.get("AWS_ENDPOINT_URL"),
                "aws_region": env.get("AWS_REGION") or env.get("AWS_DEFAULT_REGION"),
            }
            spec |= {name: value for name, value in found.items() if value}
            if "AWS_ACCESS_KEY_ID" in env:  # else TensorStore reads files and the machine's role
                context["aws_credentials"] = {"type": "environment"}
        return {**spec, "context": context}

    def exists(self) -> bool:
        """Return whether an object of this exact name exists."""
        with self._store("") as store:
            return store.read("").result(timeout=DEADLINE_S).state == "value"

    def read(self, max_bytes: int) -> bytes:
        """Read an object.

        Raises:
            FileNotFoundError: it does not exist.
            UserError: it is larger than `max_bytes`.
        """
        with self._store("") as store:
            found = store.read("").result(timeout=DEADLINE_S)
        if found.state != "value":
            raise FileNotFoundError(str(self))
        if len(found.value) > max_bytes:
            raise UserError(f"larger than the {max_bytes} bytes allowed", place=str(self))
        return found.value

    def write(self, data: bytes) -> None:
        """Write an object atomically."""
        with self._store("") as store:
            store.write("", data).result(timeout=DEADLINE_S)

    def unlink(self) -> None:
        """Remove an object if it exists."""
        with self._store("") as store:
            store.write("", None).result(timeout=DEADLINE_S)

    def names(self) -> list[str]:
        """Return the names of all objects below this folder, relative to it."""
        with self._store() as store:
            return [key.decode() for key in store.list().result(timeout=DEADLINE_S)]

    def entries(self) -> list[str]:
        """Return the names of the valid entries of this folder."""
        return (self / _MARKERS).names()

    def unfinished(self) -> list[str]:
        """Return the names of the entries of this folder without a marker."""
        found = {name.partition("/")[0] for name in self.names()}
        return sorted(found - {_MARKERS, *self.entries()})

    def remove(self) -> None:
        """Remove an entry with everything in it, its marker first."""
        self.marker.unlink()
        with self._store() as store:
            store.delete_range(type(store).KeyRange()).result()

    @contextmanager
    def _store(self, end: str = "/") -> Iterator[Any]:
        try:
            import tensorstore as ts
        except ImportError as error:
            raise UserError(
                f"the package tensorstore, which reads and writes {self}, is not installed",
                place="checkpoints.dir",
                remedy=install_command("bridge"),
            ) from error
        try:
            yield ts.KvStore.open(self.kvstore(end)).result(timeout=DEADLINE_S)
        except (ValueError, TimeoutError) as error:  # TensorStore's errors
            reason = str(error).partition("[")[0] or f"no answer in {DEADLINE_S:.0f} s"
            raise UserError(
                f"the object store fails at {self}: {reason[:300].strip()}",
                place="checkpoints.dir",
                remedy=_STORE_REMEDY,
            ) from error


Folder = Path | ObjectPath


def last_file(entry: Folder, name: str) -> Folder:
    """Return the path of an entry's last file, which makes it valid; on a disk `name` in it."""
    return entry.marker if isinstance(entry, ObjectPath) else entry / name


def folder_at(text: str) -> Folder:
    """Return the folder that a path or a URL names.

    Raises:
        UserError: a URL of another scheme, or without a bucket.
    """
    scheme, found, rest = text.partition("://")
    if not found:
        return Path(text)
    if scheme not in _DRIVERS or not rest.partition("/")[0]:
        raise UserError(
            f"{text!r} is no folder of an object store",
            place="checkpoints.dir",
            remedy="write s3://BUCKET/FOLDER, gs://BUCKET/FOLDER, or a path",
        )
    return ObjectPath(text.rstrip("/"))
