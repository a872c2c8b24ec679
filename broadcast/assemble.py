"""The disk's side of a fetch: what goes where, what is there already, and how it becomes whole.

Nothing here trusts what a killed attempt left: chunks are proven by hashing them, files that
deltas are applied to by the digests of their tensors afterwards. A delta overwrites, so that to
apply it again after a kill in the middle does no harm.
"""

from __future__ import annotations

import errno
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from broadcast.cache import Cache
from broadcast.manifest import FILE_NAME, MAX_BYTES, Chunk, ObjectInfo, WeightsManifest
from runspec.common.errors import UserError
from runspec.common.files import read_bounded, write_atomic
from runspec.common.hashing import digest_bytes

ApplyDeltas = Callable[[Path, Sequence[Path], Mapping[str, Mapping[str, Any]]], None]
"""(directory, deltas, tensors): see `bridge.delta.apply_deltas`."""
GROUP = "runspec.deltas"
_APPLYING = "applying"
_COPY_STEP = 64 * 1024 * 1024
_NO_COPY_RANGE = {errno.ENOSYS, errno.EXDEV, errno.EINVAL, errno.EOPNOTSUPP}


class BadBase(UserError):
    """The files that deltas were applied to did not become the version."""


@dataclass(frozen=True)
class Recipe:
    """What a version is made of."""

    manifest: WeightsManifest
    data: bytes
    """Its signed bytes."""
    start: WeightsManifest
    """Its `files` are what the deltas are applied to; `manifest` itself where there are none."""
    base: Path | None
    """The directory of `start`, where it is held; None: its files are fetched."""
    deltas: tuple[WeightsManifest, ...]
    """The oldest first; the last is `manifest`."""

    def __post_init__(self) -> None:
        for other in (self.start, *self.deltas):
            if set(other.files) != set(self.manifest.files):
                raise UserError(
                    f"version {self.manifest.version} and version {other.version}, which it is "
                    "made from, consist of different files",
                    remedy="the publisher must publish an anchor",
                )


@dataclass(frozen=True)
class Piece:
    """One chunk and where it goes."""

    path: Path
    offset: int
    chunk: Chunk


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


class Assembly:
    """One version on its way to becoming a directory of the cache; blocking, one thread at a time.

    Args:
        recipe: what to make it of.
        cache: where.
        patience: for the work that takes long.
    """

    def __init__(self, recipe: Recipe, cache: Cache, patience: Patience) -> None:
        version = recipe.manifest.version
        self.recipe = recipe
        self.partial = cache.partial(version)
        self._deltas = cache.deltas(version)
        self._cache, self._patience = cache, patience
        self.resumed = False
        """Whether an earlier attempt was already applying the deltas to the files that lie there"""

    def begin(self, held: Mapping[int, WeightsManifest]) -> None:
        """Makes the directories and copies files that a held version has with the same digest."""
        note = self.partial / FILE_NAME
        if not (note.exists() and read_bounded(note, MAX_BYTES) == self.recipe.data):
            self.discard()  # nothing, or of another manifest
        self.partial.mkdir(exist_ok=True)
        for delta in self.recipe.deltas:
            (self._deltas / str(delta.version)).mkdir(parents=True, exist_ok=True)
        if not note.exists():
            write_atomic(note, self.recipe.data)
        self.resumed = bool(self.recipe.deltas) and self._applying_note() == self._start_of_note()
        known = {
            info.blake3: self._cache.whole(version) / name
            for version, other in held.items()
            for name, info in other.objects.items()
        }
        for path, info in self._wanted().items():
            source = known.get(info.blake3)
            if source is not None and not path.exists():
                with suppress(FileNotFoundError):  # removed by hand: it is fetched then
                    copy_file(source, path, self._patience)

    def missing(self) -> list[Piece]:
        """Gives every file its full size and lists the chunks that are not what they should be.

        Raises:
            UserError: the disk has no room for the rest.
        """
        wanted = self._wanted()
        self._check_space(wanted)
        pieces = []
        for path, info in wanted.items():
            held = path.stat().st_size if path.exists() else 0
            with path.open("r+b" if held else "wb") as file:
                offset = 0
                for chunk in info.chunks:
                    self._patience.check("looking at what is here already", path)
                    intact = offset + chunk.size <= held and (
                        digest_bytes(os.pread(file.fileno(), chunk.size, offset)) == chunk.blake3
                    )
                    if not intact:
                        pieces.append(Piece(path, offset, chunk))
                    offset += chunk.size
                file.truncate(info.size)
        return pieces

    def copy_base(self) -> None:
        """Copies the held files that the deltas are applied to, sharing blocks where it can.

        Raises:
            BadBase: one of them is gone.
        """
        if self.recipe.base is None or self.resumed:
            return
        for name in self.recipe.manifest.files:
            source = self.recipe.base / name
            try:
                copy_file(source, self.partial / name, self._patience)
            except FileNotFoundError as error:
                raise BadBase("is gone", place=str(source)) from error

    def apply(self, apply_deltas: ApplyDeltas) -> None:
        """Turns the files of `start` into the version's, in place, and checks every tensor.

        Raises:
            BadBase: they did not become what the manifest says; they are removed.
        """
        recipe = self.recipe
        self._patience.check("waiting for the deltas", self.partial)
        write_atomic(self._deltas / _APPLYING, self._start_of_note())
        folders = [self._deltas / str(delta.version) for delta in recipe.deltas]
        try:
            apply_deltas(self.partial, folders, recipe.manifest.tensors)
        except UserError as error:
            self.discard()
            raise BadBase(
                f"with deltas {_numbers(recipe)} does not become version "
                f"{recipe.manifest.version}: {error}",
                place=str(recipe.base or f"version {recipe.start.version} as fetched"),
            ) from error

    def finish(self) -> None:
        """Syncs the files, gives the directory its final name and removes the deltas."""
        final = self._cache.whole(self.recipe.manifest.version)
        for path in self.partial.iterdir():
            with path.open("rb") as file:
                os.fsync(file.fileno())
        self.partial.rename(final)
        shutil.rmtree(self._deltas, ignore_errors=True)

    def discard(self) -> None:
        """Removes what cannot be proven: the version's files, but not deltas that came."""
        (self._deltas / _APPLYING).unlink(missing_ok=True)
        shutil.rmtree(self.partial, ignore_errors=True)

    def _wanted(self) -> dict[Path, ObjectInfo]:
        """The files whose chunks are fetched; the deltas first."""
        recipe = self.recipe
        changed = set(recipe.manifest.files) if recipe.deltas else set()
        wanted = {
            self._deltas / str(delta.version) / name: info
            for delta in recipe.deltas
            for name, info in delta.delta.items()
        }
        for name, info in recipe.manifest.objects.items():
            if name not in changed:
                wanted[self.partial / name] = info
        if recipe.base is None and not self.resumed:
            for name in changed:
                wanted[self.partial / name] = recipe.start.objects[name]
        return wanted

    def _check_space(self, wanted: Mapping[Path, ObjectInfo]) -> None:
        sizes = {path: info.size for path, info in wanted.items()}
        if self.recipe.base is not None and not self.resumed:
            for name in self.recipe.manifest.files:  # shared blocks are taken too, once changed
                with suppress(FileNotFoundError):
                    sizes[self.partial / name] = (self.recipe.base / name).stat().st_size
        needed = sum(max(0, size - _allocated(path)) for path, size in sizes.items())
        free = shutil.disk_usage(self.partial).free
        if needed > free:
            raise UserError(
                f"version {self.recipe.manifest.version} needs {needed / 1e9:.3f} GB more on this "
                f"disk, which has {free / 1e9:.3f} GB free: {(needed - free) / 1e9:.3f} GB are "
                "missing",
                place=str(self.partial),
                remedy="free that much, or fetch into a directory on another disk",
            )

    def _start_of_note(self) -> bytes:
        start = self.recipe.start
        return f"{start.version} {start.model_digest}\n".encode()

    def _applying_note(self) -> bytes | None:
        try:
            return read_bounded(self._deltas / _APPLYING, 1024)
        except FileNotFoundError:
            return None


def delta_applier(group: str = GROUP) -> ApplyDeltas:
    """What applies deltas; looked up only where a version needs it: this package knows no tensors.

    Raises:
        UserError: it is not installed.
    """
    try:
        (found,) = entry_points(group=group, name="bridge")
        return found.load()
    except (ValueError, ImportError) as error:
        raise UserError(
            f"nothing is installed that applies deltas (entry point `bridge` of {group}): {error}",
            remedy="pip install 'runspec[bridge]'",
        ) from error


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


def _allocated(path: Path) -> int:
    try:
        return path.stat().st_blocks * 512
    except FileNotFoundError:
        return 0


def _numbers(recipe: Recipe) -> str:
    return ", ".join(str(delta.version) for delta in recipe.deltas)
