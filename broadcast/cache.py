"""Folder of the versions that a client has fetched, with a lock for each version.

    CACHE/v<N>/           a complete, checked version: its files and manifest.json
    CACHE/.partial-v<N>/  an incomplete version; one rename makes it v<N>
    CACHE/.deltas-v<N>/   deltas to apply to the incomplete version
    CACHE/.lock-v<N>      flock: exclusive to make or remove the version, shared to copy from it

The locks work between threads, clients and processes. A killed process releases its locks.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import shutil
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from pathlib import Path

from broadcast.manifest import FILE_NAME, MAX_BYTES, WeightsManifest, open_manifest
from runspec.core.canonical import digest_bytes
from runspec.core.errors import UserError
from runspec.core.files import open_lock, read_bounded
from runspec.core.signed import BadSignature

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

    @asynccontextmanager
    async def making(self, version: int, deadline: float) -> AsyncIterator[None]:
        """Hold the exclusive lock of a version: nobody else makes, removes or reads it.

        Raises:
            UserError: someone else still holds it at the deadline.
        """
        while True:
            with self.locked(version) as mine:
                if mine:
                    yield
                    return
            if time.monotonic() > deadline:
                raise UserError(
                    f"version {version} is still being fetched or copied by someone else",
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
        """Remove all other versions, except those that a fetch makes or reads."""
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
