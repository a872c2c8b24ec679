"""The store: versions of a run as static files, so that any HTTP server can serve them.

    STORE/<run>/roles.json  latest.json  versions/<N>/manifest.json  chunks/<blake3>

Chunks are named by their contents, so versions share those that they have in common. Every file
appears by rename; the manifest after its chunks, latest.json after the manifest.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from blake3 import blake3

from broadcast import layout
from broadcast.manifest import (
    FILE_NAME,
    MAX_BYTES,
    MAX_CHUNK_BYTES,
    Chunk,
    ObjectInfo,
    WeightsManifest,
    is_object_name,
    open_manifest,
    sign_manifest,
)
from runspec.common import latest as latest_format
from runspec.common import roles as roles_format
from runspec.common.canonical import MalformedJson, parse_object
from runspec.common.errors import UserError
from runspec.common.files import read_bounded, remove_leftovers, write_atomic
from runspec.common.hashing import digest_bytes, is_digest
from runspec.common.keys import SigningKey
from runspec.common.signed import BadSignature, open_document

CHUNK_BYTES = 16 * 1024 * 1024
TENSORS_NAME = "tensors.json"
LOCK_DEADLINE_S = 30.0


def publish(
    store: Path,
    directory: Path,
    *,
    run: str,
    version: int,
    key: SigningKey,
    roles: bytes,
    chunk_bytes: int = CHUNK_BYTES,
    base: int | None = None,
) -> str:
    """Publishes the files of `directory` as a version and moves latest.json forward.

    Every file but `tensors.json` (which goes into the manifest) becomes an object. Publishing the
    same version again with the same contents is harmless and continues where a crash left off.

    Args:
        store: the store's directory, shared by all runs.
        directory: the version's files, without sub-directories.
        run: the run's id.
        version: a version number is published once.
        key: a publisher's key, which `roles` names.
        roles: the signed roles.json to publish beside it.
        chunk_bytes: size of the pieces that files are cut into.
        base: the version that the deltas in `directory` start from.

    Returns:
        The manifest digest.

    Raises:
        UserError: the version was published with other contents or is older than the newest and
            pruned, an unusable file name, disk full.
    """
    if not layout.is_run(run) or not layout.is_version(version):
        raise UserError(f"run {run!r} or version {version} is malformed", place=str(directory))
    if not 0 < chunk_bytes <= MAX_CHUNK_BYTES:
        raise UserError(f"chunk_bytes {chunk_bytes} is not in 1 to {MAX_CHUNK_BYTES}")
    _check_publisher(roles, run, key)
    model_digest, tensors, files = _tensors(directory / TENSORS_NAME)
    with _locked(store, run):
        if base is not None and not (
            base < version and (store / layout.manifest_name(run, base)).exists()
        ):
            raise UserError(f"base {base} is not an older published version", place=str(store))
        manifest = store / layout.manifest_name(run, version)
        newest = newest_version(store, run=run)
        if newest is not None and version <= newest and not manifest.exists():
            raise UserError(
                f"version {version} is gone, and its number may have been published: "
                f"the newest is {newest}",
                place=str(manifest),
                remedy=f"a version number is published once: publish as {newest + 1} or later",
            )
        remove_leftovers(store / run / "chunks")
        objects = {
            path.name: _store_object(store, run, path, chunk_bytes) for path in _files(directory)
        }
        data = sign_manifest(
            WeightsManifest(run, version, base, model_digest, tensors, files, objects, {}), key
        )
        digest = digest_bytes(data)
        if not manifest.exists():
            write_atomic(manifest, data)
        elif (published := digest_bytes(read_bounded(manifest, MAX_BYTES))) != digest:
            raise UserError(
                f"version {version} is published already, with other contents "
                f"({published[:16]}, not {digest[:16]})",
                place=str(manifest),
                remedy="a version number is published once: publish under a newer one",
            )
        write_atomic(store / layout.roles_name(run), roles)
        if newest is None or newest < version:
            write_atomic(
                store / layout.latest_name(run),
                latest_format.sign_latest(run, version, digest, key),
            )
    return digest


def refresh_latest(store: Path, *, run: str, key: SigningKey) -> None:
    """Signs latest.json again, so that it does not expire; nothing where none is published."""
    with _locked(store, run):
        newest = newest_version(store, run=run)
        if newest is None:
            return
        digest = digest_bytes(read_bounded(store / layout.manifest_name(run, newest), MAX_BYTES))
        write_atomic(
            store / layout.latest_name(run), latest_format.sign_latest(run, newest, digest, key)
        )


def prune(store: Path, *, run: str, keep_versions: int) -> None:
    """Removes all but the newest `keep_versions` versions, and every chunk that none of them needs.

    A version that a kept one is based on is kept too. A file that is being read stays readable.

    Raises:
        UserError: a stored manifest is damaged; nothing was removed.
    """
    with _locked(store, run):
        # Listed before the manifests are read: a chunk that comes later belongs to a later one.
        stored = [path for path in (store / run / "chunks").glob("*") if is_digest(path.name)]
        manifests = {
            version: _stored_manifest(store, run, version)
            for version in layout.stored_versions(store, run)
        }
        kept: set[int] = set()
        wanted: list[int | None] = [*sorted(manifests)[-keep_versions:]]
        while wanted:
            version = wanted.pop()
            if version is not None and version in manifests and version not in kept:
                kept.add(version)
                wanted.append(manifests[version].base)
        # Manifests go first: a chunk is never removed while a manifest still names it.
        for version in manifests.keys() - kept:
            shutil.rmtree((store / layout.manifest_name(run, version)).parent)
        needed = {digest for version in kept for digest in manifests[version].chunks()}
        for path in stored:
            if path.name not in needed:
                path.unlink(missing_ok=True)


def newest_version(store: Path, *, run: str) -> int | None:
    """The version that latest.json names; None where none is published."""
    path = store / layout.latest_name(run)
    if not path.exists():
        return None
    return latest_version(read_bounded(path, latest_format.MAX_BYTES), place=path)


def latest_version(data: bytes, *, place: Path) -> int:
    """The version in a latest.json of one's own store, expired or not."""
    try:
        payload = open_document(
            data, kind=latest_format.KIND, keys=None, max_bytes=latest_format.MAX_BYTES
        ).payload
    except BadSignature as error:
        raise UserError(
            f"damaged: {error}", place=str(place), remedy="remove the file and publish again"
        ) from error
    if not layout.is_version(payload.get("version")):
        raise UserError("damaged: no version", place=str(place), remedy="publish again")
    return payload["version"]


def _stored_manifest(store: Path, run: str, version: int) -> WeightsManifest:
    path = store / layout.manifest_name(run, version)
    try:
        return open_manifest(read_bounded(path, MAX_BYTES), run=run, publishers=None)
    except BadSignature as error:
        raise UserError(
            f"damaged: {error}", place=str(path), remedy="remove the version's folder"
        ) from error


def _check_publisher(roles: bytes, run: str, key: SigningKey) -> None:
    """Early and clear, what every client would say later. (The root key is theirs to check.)"""
    try:
        payload = open_document(
            roles, kind=roles_format.KIND, keys=None, max_bytes=roles_format.MAX_BYTES
        ).payload
        named = payload["run"] == run and key.public_hex in payload["roles"]["publisher"]
    except (BadSignature, KeyError, TypeError) as error:
        raise UserError(f"cannot read roles.json: {error}", remedy="sign a new one") from error
    if not named:
        raise UserError(
            f"roles.json does not name {key.public_hex[:16]} a publisher of run {run!r}",
            remedy="publish with a publisher's key, or sign a roles.json that names this one",
        )


def _tensors(path: Path) -> tuple[str | None, dict[str, dict[str, Any]], tuple[str, ...]]:
    if not path.exists():
        return None, {}, ()
    try:
        parsed = parse_object(read_bounded(path, MAX_BYTES), max_bytes=MAX_BYTES)
        return parsed["model_digest"], parsed["tensors"], tuple(parsed["files"])
    except (MalformedJson, KeyError) as error:
        raise UserError(
            f"malformed: {error}", place=str(path), remedy="export the version again"
        ) from error


def _files(directory: Path) -> list[Path]:
    if not directory.is_dir():
        raise UserError("not a directory", place=str(directory), remedy="export a version first")
    paths = sorted(path for path in directory.iterdir() if path.name != TENSORS_NAME)
    for path in paths:
        if not path.is_file() or not is_object_name(path.name):
            raise UserError(
                "cannot be published: a plain file with a plain name is needed",
                place=str(path),
                remedy=f"names are letters, digits, '.', '_', '-', and not {FILE_NAME}",
            )
    if not paths:
        raise UserError("nothing to publish", place=str(directory), remedy="export a version")
    return paths


def _store_object(store: Path, run: str, path: Path, chunk_bytes: int) -> ObjectInfo:
    """Copies a file into the store chunk by chunk; one chunk is in memory."""
    whole = blake3()
    chunks = []
    with path.open("rb") as file:
        while data := file.read(chunk_bytes):
            whole.update(data)
            chunk = Chunk(digest_bytes(data), len(data))
            target = store / layout.chunk_name(run, chunk.blake3)
            if not target.exists():
                write_atomic(target, data)
            chunks.append(chunk)
    return ObjectInfo(sum(c.size for c in chunks), whole.hexdigest(), tuple(chunks))


@contextmanager
def _locked(store: Path, run: str) -> Iterator[None]:
    """Only one process changes a run's part of a store at a time; a killed one lets go."""
    folder = store / run
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        deadline = time.monotonic() + LOCK_DEADLINE_S
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise UserError(
                        f"another publisher has held this store for {LOCK_DEADLINE_S:.0f} s",
                        place=str(folder),
                        remedy="let one process publish a run",
                    ) from None
                time.sleep(0.02)
        yield
    finally:
        os.close(descriptor)
