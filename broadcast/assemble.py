"""The way to a version, and the files of a fetch: where each chunk goes, what is there already.

A version has at most one base, so the versions that it can be made from form one path back in time.
A client starts from a version on this path that it holds, or fetches the files of an anchor. Then
it fetches and applies the deltas of all later versions on the path. Deltas keep the names and sizes
of the files that they are applied to. So all anchors on a path have the same size, and the newest
anchor is the cheapest. Of older versions only a held one can be cheaper.

Nothing here trusts what a killed attempt left. Chunks are checked by their hash. Files that deltas
are applied to are checked afterwards, by the digests of their tensors. A delta overwrites, so
applying it again after a kill does no harm.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from broadcast.disk import Cache, Cancellation, allocated, copy_file
from broadcast.manifest import FILE_NAME, MAX_BYTES, Chunk, ObjectInfo, WeightsManifest
from runspec.core.canonical import canonical_json, digest_bytes
from runspec.core.entry_points import install_command
from runspec.core.errors import UserError
from runspec.core.files import read_bounded, write_atomic

ApplyDeltas = Callable[[Path, Sequence[Path], Mapping[str, Mapping[str, Any]]], None]
"""(directory, deltas, tensors): see `bridge.delta.apply_deltas`."""
GROUP = "runspec.deltas"
_LOG = logging.getLogger(__name__)
_START = "start.json"
"""File in the folder of deltas that names the files that they are applied to."""
_APPLYING = "applying"
"""File in the folder of deltas that exists once their application has begun."""


class BadBase(UserError):
    """The files that deltas were applied to did not become the version."""


MAX_LINKS = 256
"""Largest number of deltas for one version; it also limits the manifests requested."""


@dataclass(frozen=True)
class Chain:
    """A way to make a version."""

    start: int
    """The version to whose files the deltas are applied."""
    held: bool
    """Whether the files of `start` are here; else they are fetched."""
    deltas: tuple[int, ...]
    """Versions whose deltas are applied, the oldest first; the last is the target."""
    size: int
    """Bytes to fetch for the files that hold the tensors."""


def cheapest(
    target: int, manifests: Mapping[int, WeightsManifest | None], held: Collection[int]
) -> Chain | int:
    """Return the way to `target` with the fewest bytes; among equal ones, with the fewest deltas.

    The result is a version's number if its manifest must be known first.
    It requests no manifest that cannot make the way cheaper.

    Args:
        target: the version wanted.
        manifests: known manifests of it and of older versions; None if nobody has it.
        held: versions whose files are here.

    Raises:
        UserError: there is no way; the message names the missing version.
    """
    best: Chain | None = None
    deltas: list[int] = []
    size, version = 0, target
    oldest_held = min(held, default=target + 1)
    while best is None or (size < best.size and oldest_held <= version):
        if version in held:
            return _chain(version, True, deltas, size)
        if version not in manifests:
            return version
        manifest = manifests[version]
        if best is None and manifest is not None and manifest.is_anchor:
            best = _chain(version, False, deltas, size + manifest.weights_bytes)
        if manifest is None or manifest.base is None or len(deltas) == MAX_LINKS:
            break
        deltas.append(version)
        size += manifest.delta_bytes
        version = manifest.base
    if best is None:
        raise UserError(
            f"version {target} cannot be made: it needs version {version}, which no server has"
            if len(deltas) < MAX_LINKS
            else f"version {target} cannot be made: there is no anchor within {MAX_LINKS} deltas",
            remedy="fetch a newer version, or publish one as an anchor",
        )
    return best


def _chain(start: int, held: bool, newest_first: list[int], size: int) -> Chain:
    return Chain(start, held, tuple(reversed(newest_first)), size)


@dataclass(frozen=True)
class Recipe:
    """The parts that a version is made of."""

    manifest: WeightsManifest
    data: bytes
    """Signed bytes of `manifest`."""
    start: WeightsManifest
    """Manifest of the files that deltas are applied to; `manifest` itself if there are none."""
    base: Path | None
    """Directory of `start` if it is held; None: its files are fetched."""
    deltas: tuple[WeightsManifest, ...]
    """Versions whose deltas are applied, the oldest first; the last is `manifest`."""

    @property
    def numbers(self) -> str:
        """The versions of the deltas, for a message."""
        return ", ".join(str(delta.version) for delta in self.deltas)

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


class Assembly:
    """One version that becomes a directory of the cache.

    Its methods block; one thread at a time may call them.

    Args:
        recipe: the parts of the version.
        cache: gets the version.
        cancellation: ends the work that takes long.
    """

    def __init__(self, recipe: Recipe, cache: Cache, cancellation: Cancellation) -> None:
        version = recipe.manifest.version
        self.recipe = recipe
        self.name = f"version {version}"
        self.partial = cache.partial(version)
        self._deltas = cache.deltas(version)
        self._cache, self.cancellation = cache, cancellation
        self.resumed = False
        """Whether an earlier attempt had begun to apply the deltas to the files that are here."""

    def begin(self, held: Mapping[int, WeightsManifest]) -> None:
        """Make the directories and find what need not be fetched.

        That is what a killed attempt left, for this version or for another one that starts from
        the same files, and files of held versions with the same digest.
        """
        signed, note = self.partial / FILE_NAME, self._deltas / _START
        if not (signed.exists() and read_bounded(signed, MAX_BYTES) == self.recipe.data):
            (self._deltas / _APPLYING).unlink(missing_ok=True)
            shutil.rmtree(self.partial, ignore_errors=True)  # nothing, or of another manifest
        self.partial.mkdir(exist_ok=True)
        self._deltas.mkdir(exist_ok=True)
        for delta in self.recipe.deltas:
            (self._deltas / str(delta.version)).mkdir(exist_ok=True)
        if _read(note) != self._start_note():
            (self._deltas / _APPLYING).unlink(missing_ok=True)
            write_atomic(note, self._start_note())
        if not signed.exists():
            write_atomic(signed, self.recipe.data)
        self._take_over()
        self.resumed = (self._deltas / _APPLYING).exists()
        self._copy_known(held)

    def _take_over(self) -> None:
        """Take the files to start from out of an ended fetch of another version.

        So a slow joiner makes progress even if a newer version exists each time that it begins.
        """
        manifest, reached = self.recipe.manifest, {d.version for d in self.recipe.deltas}
        if self.recipe.base is not None:
            return
        for version in self._cache.unfinished():
            if version == manifest.version:
                continue
            with self._cache.locked(version) as mine:
                partial, deltas = self._cache.partial(version), self._cache.deltas(version)
                applying = (deltas / _APPLYING).exists()
                if not mine or _read(deltas / _START) != self._start_note():
                    continue
                names = [n for n in manifest.files if not (self.partial / n).exists()]
                # Deltas changed these files: only ours may have, and none of ours may be here.
                if applying and (version not in reached or len(names) < len(manifest.files)):
                    continue
                for name in names:
                    with suppress(FileNotFoundError):
                        (partial / name).rename(self.partial / name)
                if applying:
                    (deltas / _APPLYING).rename(self._deltas / _APPLYING)
                self._cache.remove(version)

    def _copy_known(self, held: Mapping[int, WeightsManifest]) -> None:
        known = {
            info.blake3: self._cache.whole(version) / name
            for version, other in held.items()
            for name, info in other.objects.items()
        }
        for path, info in self._wanted().items():
            source = known.get(info.blake3)
            if source is not None and not path.exists():
                with suppress(FileNotFoundError):  # removed by hand: it is fetched then
                    copy_file(source, path, self.cancellation)

    def missing(self) -> list[Piece]:
        """Give every file its full size, and list the chunks that are missing or damaged.

        Raises:
            UserError: the disk has no room for them.
        """
        wanted = self._wanted()
        self._check_space(wanted)
        pieces = []
        if here := sum(map(allocated, wanted)):
            _LOG.info("%s: checking %.1f MB that were fetched before", self.name, here / 1e6)
        for path, info in wanted.items():
            held = path.stat().st_size if path.exists() else 0
            with path.open("r+b" if held else "wb") as file:
                offset = 0
                for chunk in info.chunks:
                    self.cancellation.check("checking what was fetched before", path)
                    intact = offset + chunk.size <= held and (
                        digest_bytes(os.pread(file.fileno(), chunk.size, offset)) == chunk.blake3
                    )
                    if not intact:
                        pieces.append(Piece(path, offset, chunk))
                    offset += chunk.size
                file.truncate(info.size)
        return pieces

    def copy_base(self) -> None:
        """Copy the held files that the deltas are applied to, with shared blocks if possible.

        Raises:
            BadBase: one of them is gone.
        """
        if self.recipe.base is None or self.resumed:
            return
        _LOG.info("%s: copying the files of version %d", self.name, self.recipe.start.version)
        for name in self.recipe.manifest.files:
            source = self.recipe.base / name
            try:
                copy_file(source, self.partial / name, self.cancellation)
            except FileNotFoundError as error:
                raise BadBase("is gone", place=str(source)) from error

    def apply(self, apply_deltas: ApplyDeltas) -> None:
        """Turn the files of `start` into the version's, in place, and check every tensor.

        Raises:
            BadBase: they did not become what the manifest says; they are removed.
        """
        recipe = self.recipe
        self.cancellation.check("waiting for the deltas", self.partial)
        _LOG.info("%s: applying deltas %s", self.name, recipe.numbers)
        (self._deltas / _APPLYING).touch()
        folders = [self._deltas / str(delta.version) for delta in recipe.deltas]
        try:
            apply_deltas(self.partial, folders, recipe.manifest.tensors)
        except UserError as error:
            (self._deltas / _APPLYING).unlink()
            for name in recipe.manifest.files:
                (self.partial / name).unlink(missing_ok=True)
            raise BadBase(
                f"with deltas {recipe.numbers} does not become version "
                f"{recipe.manifest.version}: {error}",
                place=str(recipe.base or f"version {recipe.start.version} as fetched"),
            ) from error

    def finish(self) -> None:
        """Sync the files, give the directory its final name and remove the deltas."""
        final = self._cache.whole(self.recipe.manifest.version)
        for path in self.partial.iterdir():
            with path.open("rb") as file:
                os.fsync(file.fileno())
        self.partial.rename(final)
        shutil.rmtree(self._deltas, ignore_errors=True)

    def _wanted(self) -> dict[Path, ObjectInfo]:
        """Return the files whose chunks are fetched; the deltas first."""
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
            for name in self.recipe.manifest.files:  # a shared block takes room once it changes
                with suppress(FileNotFoundError):
                    sizes[self.partial / name] = (self.recipe.base / name).stat().st_size
        needed = sum(max(0, size - allocated(path)) for path, size in sizes.items())
        free = shutil.disk_usage(self.partial).free
        if needed > free:
            raise UserError(
                f"version {self.recipe.manifest.version} needs {needed / 1e9:.3f} GB more on this "
                f"disk, which has {free / 1e9:.3f} GB free: {(needed - free) / 1e9:.3f} GB are "
                "missing",
                place=str(self.partial),
                remedy="free that much, or fetch into a directory on another disk",
            )

    def _start_note(self) -> bytes:
        """Describe the files in `partial` before deltas are applied to them."""
        start, held = self.recipe.start, self.recipe.base is not None
        files = {} if held else {name: start.objects[name].blake3 for name in start.files}
        return canonical_json({"version": start.version, "held": held, "files": files})


def _read(path: Path) -> bytes | None:
    try:
        return read_bounded(path, MAX_BYTES)
    except FileNotFoundError:
        return None


def delta_applier(group: str = GROUP) -> ApplyDeltas:
    """Return the function that applies deltas, from an entry point.

    It is looked up only if a version needs it, because this package does not depend on tensors.

    Raises:
        UserError: none is installed.
    """
    try:
        return next(iter(entry_points(group=group, name="bridge"))).load()
    except (StopIteration, ImportError) as error:
        raise UserError(
            f"nothing is installed that applies deltas (entry point `bridge` of {group}): {error}",
            remedy=install_command("bridge"),
        ) from error
