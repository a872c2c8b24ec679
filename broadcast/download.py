"""Fills a version's directory from chunks, resuming what is on disk, and names it when whole."""

from __future__ import annotations

import asyncio
import os
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from broadcast.fetcher import PARALLEL_CHUNKS, Fetcher, for_each
from broadcast.manifest import (
    FILE_NAME,
    MAX_BYTES,
    Chunk,
    ObjectInfo,
    WeightsManifest,
    open_manifest,
)
from runspec.common.errors import UserError
from runspec.common.files import read_bounded, write_atomic
from runspec.common.hashing import digest_bytes, digest_file
from runspec.common.signed import BadSignature

PARTIAL = ".partial-"


@dataclass(frozen=True)
class _Piece:
    """One chunk and where it goes."""

    path: Path
    offset: int
    chunk: Chunk


async def download(
    fetcher: Fetcher, manifest: WeightsManifest, data: bytes, final: Path, deadline: float
) -> int:
    """Makes `final` appear by one rename, every byte of it checked.

    A killed download leaves a partial directory. What it holds is proven by its digests, not by
    notes: the next attempt hashes it and fetches the rest. Files that an older version beside
    `final` has with the same digest are copied from there.

    Args:
        fetcher: where chunks come from.
        manifest: checked.
        data: its signed bytes.
        final: the directory to make.
        deadline: of the monotonic clock.

    Returns:
        Bytes that came over the network.

    Raises:
        UserError: not whole in time, or the disk is full.
    """
    partial = final.with_name(PARTIAL + final.name)
    try:
        _begin(partial, data)
        _copy_known(manifest, partial, final)
        pieces = await asyncio.to_thread(_missing, manifest, partial)
        await _fetch_all(fetcher, pieces, deadline)
        await asyncio.to_thread(_finish, manifest, partial, final)
    except OSError as error:
        raise UserError(
            f"cannot write version {manifest.version}: {error.strerror or error}",
            place=str(partial),
            remedy="free disk space or mend the permissions, then fetch again: it resumes",
        ) from error
    return sum(piece.chunk.size for piece in pieces)


def _begin(partial: Path, data: bytes) -> None:
    note = partial / FILE_NAME
    if partial.exists() and not (note.exists() and read_bounded(note, MAX_BYTES) == data):
        shutil.rmtree(partial)  # of another manifest
    partial.mkdir(exist_ok=True)
    if not note.exists():
        write_atomic(note, data)


def _copy_known(manifest: WeightsManifest, partial: Path, final: Path) -> None:
    """Copies unchanged files, such as the tokenizer's; like all that lies there they are hashed."""
    known: dict[str, Path] = {}
    for path in final.parent.glob(f"v*/{FILE_NAME}"):
        try:
            other = open_manifest(read_bounded(path, MAX_BYTES), run=manifest.run, publishers=None)
        except (BadSignature, OSError):
            continue  # another run's, or just being pruned: nothing to save here
        known |= {info.blake3: path.parent / name for name, info in other.objects.items()}
    for name, info in manifest.objects.items():
        source = known.get(info.blake3)
        if source is not None and not (partial / name).exists():
            with suppress(FileNotFoundError):  # pruned in this moment: it is fetched then
                shutil.copyfile(source, partial / name)


def _missing(manifest: WeightsManifest, partial: Path) -> list[_Piece]:
    """Gives every file its full size and lists the chunks that are not yet what they should be."""
    pieces = []
    for name, info in manifest.objects.items():
        path = partial / name
        held = path.stat().st_size if path.exists() else 0
        with path.open("r+b" if held else "wb") as file:
            offset = 0
            for chunk in info.chunks:
                intact = offset + chunk.size <= held and (
                    digest_bytes(os.pread(file.fileno(), chunk.size, offset)) == chunk.blake3
                )
                if not intact:
                    pieces.append(_Piece(path, offset, chunk))
                offset += chunk.size
            file.truncate(info.size)
    return pieces


async def _fetch_all(fetcher: Fetcher, pieces: list[_Piece], deadline: float) -> None:
    async def fetch(piece: _Piece) -> None:
        what = f"{piece.path.name} at byte {piece.offset}"
        await fetcher.chunk(piece.chunk, what, deadline, into=piece.path, offset=piece.offset)

    await for_each(pieces, fetch, parallel=PARALLEL_CHUNKS)


def _finish(manifest: WeightsManifest, partial: Path, final: Path) -> None:
    for name, info in manifest.objects.items():
        path = partial / name
        _check_whole(path, info)
        with path.open("rb") as file:
            os.fsync(file.fileno())
    try:
        partial.rename(final)
    except OSError:
        if not final.exists():
            raise
        shutil.rmtree(partial)  # another process fetched the same version first


def _check_whole(path: Path, info: ObjectInfo) -> None:
    if path.stat().st_size == info.size and digest_file(path) == info.blake3:
        return
    path.unlink()
    raise UserError(
        "every chunk is right and the whole is not: the disk lies, or the manifest contradicts "
        "itself",
        place=str(path),
        remedy="fetch again; if it stays so, the publisher must publish a new version",
    )
