"""The store: publishes versions of a run as static files, so that any HTTP server can serve them.

    STORE/<run>/roles.json  latest.json  versions/<N>/manifest.json  chunks/<blake3>

Chunks are named by their contents, so versions share equal chunks. Every file appears by rename:
the manifest after its chunks, latest.json after the manifest. Manifest and latest.json are synced.
Chunks are not: they are verified before they are served (`chunk_files`).
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from broadcast import layout
from broadcast.disk import ChunkWriter, Identity, identity
from broadcast.layout import TENSORS_NAME, check_newest, locked, signers_of
from broadcast.manifest import (
    FILE_NAME,
    MAX_BYTES,
    MAX_CHUNK_BYTES,
    WeightsManifest,
    is_object_name,
    open_manifest,
    sign_manifest,
)
from broadcast.relay_store import RelayStore
from runspec.core.canonical import MalformedJson, digest_bytes
from runspec.core.errors import UserError
from runspec.core.files import read_bounded, read_object, remove_leftovers, write_atomic
from runspec.core.roles import LATEST, MAX_LATEST_BYTES, Signers, sign_latest
from runspec.core.signed import BadSignature, SigningKey, open_document

CHUNK_BYTES = 16 * 1024 * 1024
_LOG = logging.getLogger(__name__)
DELTA_NAME = "delta"
"""Sub-folder of a version's directory that holds its delta."""
LOCK_DEADLINE_S = 30.0
"""Seconds to wait for another process that publishes or prunes."""


class AlreadyPublished(UserError):
    """A version's number is taken, by other contents or another key.

    Args:
        manifest_digest: digest of the manifest that is there.
        thing, place, remedy: see `UserError`.
    """

    def __init__(self, manifest_digest: str, thing: str, *, place: str, remedy: str) -> None:
        self.manifest_digest = manifest_digest
        super().__init__(thing, place=place, remedy=remedy)


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
    whole: bool = True,
) -> str:
    """Publish the files of `directory` as a version and move latest.json forward.

    Every file but `tensors.json` (which goes into the manifest) becomes an object; with a base,
    every file of `directory/delta/` becomes part of its delta. Publishing the same version again
    with the same contents is harmless, continues where a crash left off, and mends stored chunks
    that are damaged.

    Args:
        store: the store's directory, shared by all runs.
        directory: the version's files; of sub-directories only `delta` is read.
        run: the run's id.
        version: its number; a number is published once.
        key: a publisher's key, which `roles` names.
        roles: the signed roles.json to publish with it.
        chunk_bytes: size of the pieces that files are cut into.
        base: the published version from which `directory/delta/` makes this one.
        whole: False leaves out the files that hold the tensors; the delta replaces them.

    Returns:
        The manifest digest.

    Raises:
        AlreadyPublished: the version was published with other contents or by another key.
        UserError: it is older than the newest and pruned; the base or its delta is missing; an
            unusable file name; a newer roles.json is in the store; another publisher is at work;
            disk full (then nothing new stays in the store).
    """
    if not layout.is_run(run) or not layout.is_version(version):
        raise UserError(f"run {run!r} or version {version} is malformed", place=str(directory))
    if not 0 < chunk_bytes <= MAX_CHUNK_BYTES:
        raise UserError(f"chunk_bytes {chunk_bytes} is not in 1 to {MAX_CHUNK_BYTES}")
    publishers = signers_of(roles, run, key)
    model_digest, tensors, files = _tensors(directory / TENSORS_NAME)
    if base is not None or not whole:
        _check_delta(directory, version, files, base)
    with _writing(store, run, roles, chunk_bytes) as chunks:
        if base is not None:
            _check_base(store, run, base, version, files, publishers)
        newest, path = newest_version(store, run=run), store / layout.manifest_name(run, version)
        if newest is not None and version <= newest and not path.exists():
            raise UserError(
                f"version {version} is gone, and its number may have been published: "
                f"the newest is {newest}",
                place=str(path),
                remedy=f"a version number is published once: publish as {newest + 1} or later",
            )
        objects = {
            path.name: chunks.add(path)
            for path in _files(directory)
            if whole or path.name not in files
        }
        delta_files = _files(directory / DELTA_NAME) if base is not None else ()
        delta = {path.name: chunks.add(path) for path in delta_files}
        manifest = WeightsManifest(run, version, base, model_digest, tensors, files, objects, delta)
        return _write_manifest(store, manifest, key, roles, chunks)


def publish_objects(
    store: Path,
    contents: Mapping[str, Path | memoryview | Iterator[bytes]],
    *,
    run: str,
    version: int,
    key: SigningKey,
    roles: bytes,
    chunk_bytes: int = CHUNK_BYTES,
    signers: Signers = "island",
) -> str:
    """Publish files, or bytes in memory, as a version that has no tensors.

    A learner island publishes its shares so, in its own store. Readers know such a version by the
    digest of its manifest. So versions may come in any order, and a pruned one may come again.
    Repeating a publication is harmless, as in `publish`.

    Args:
        store: the store's directory.
        contents: each file by name, or its bytes (format "B", or one piece after the other).
        run: the run's id.
        version: its number.
        key: the key of a signer, which `roles` names.
        roles: the signed roles.json to publish with it.
        chunk_bytes: size of the pieces that files are cut into.
        signers: whose key it is.

    Returns:
        The manifest digest.

    Raises:
        AlreadyPublished: the version is there with other contents or by another key.
        UserError: a newer roles.json is in the store; another process is at work; disk full (then
            nothing new stays in the store).
    """
    signers_of(roles, run, key, signers)
    with _writing(store, run, roles, chunk_bytes) as chunks:
        objects = {name: chunks.add(data) for name, data in contents.items()}
        manifest = WeightsManifest(run, version, None, None, {}, (), objects, {})
        return _write_manifest(store, manifest, key, roles, chunks)


def publish_data(store: Path, files: Mapping[str, Path], *, run: str, **options: Any) -> None:
    """Publish the files of a run's problems, by BLAKE3 digest, as the one version of `data_run`.

    Its number changes only where files or key differ from what is there. `options` and errors are
    those of `publish_objects`.
    """
    name = layout.data_run(run)
    version = newest_version(store, run=name) or 0
    put = partial(publish_objects, store, files, run=name, signers="publisher", **options)
    try:
        put(version=version)
    except AlreadyPublished:
        put(version=version + 1)
    prune(store, run=name, keep_versions=1)


def refresh_latest(store: Path, *, run: str, key: SigningKey, roles: bytes | None = None) -> None:
    """Sign latest.json again, so that it does not expire; do nothing if no version is published.

    It names the newest stored version. A version whose publication stopped before its announcement
    is announced now.

    Args:
        store: the store's directory.
        run: the run's id.
        key: a publisher's key.
        roles: the signed roles.json to serve from now on; None leaves the one that is there.
    """
    with locked(store, run, LOCK_DEADLINE_S):
        newest = max(layout.stored_versions(store, run), default=None)
        if newest is None:
            return
        if roles is not None:
            check_newest(store / layout.roles_name(run), roles)
            write_atomic(store / layout.roles_name(run), roles)
        digest = digest_bytes(read_bounded(store / layout.manifest_name(run, newest), MAX_BYTES))
        write_atomic(store / layout.latest_name(run), sign_latest(run, newest, digest, key))


def prune(store: Path, *, run: str, keep_versions: int) -> None:
    """Remove the versions that `versions_to_keep` does not name, and chunks that none needs.

    A version that a client reads stays for a while (`pins`). A file that is being read stays
    readable.

    Raises:
        UserError: a stored manifest is damaged; nothing was removed.
    """
    with locked(store, run, LOCK_DEADLINE_S):
        newest = newest_version(store, run=run)
        if newest is None:
            return
        held = RelayStore(store, run, keep_versions=keep_versions, max_bytes=None, log=_LOG)
        for version in layout.stored_versions(store, run):
            path = held.manifest_path(version)
            held.manifests[version] = _stored(path, run, identity(path))
        held.prune(newest)


@contextmanager
def _writing(store: Path, run: str, roles: bytes, chunk_bytes: int) -> Iterator[ChunkWriter]:
    """Hold the run's lock and yield a writer of chunks; if the block fails, none of them stays."""
    with locked(store, run, LOCK_DEADLINE_S):
        check_newest(store / layout.roles_name(run), roles)
        chunks = store / layout.chunks_name(run)
        remove_leftovers(chunks)
        writer = ChunkWriter(chunks, chunk_bytes)
        try:
            yield writer
        except BaseException:  # so that a full disk recovers
            for path in writer.new:
                path.unlink(missing_ok=True)
            raise


def newest_version(store: Path, *, run: str) -> int | None:
    """Return the version that latest.json names; None if none is published."""
    path = store / layout.latest_name(run)
    if not path.exists():
        return None
    return latest_version(read_bounded(path, MAX_LATEST_BYTES), place=path)


def latest_version(data: bytes, *, place: Path) -> int:
    """Return the version in a latest.json of one's own store, expired or not."""
    try:
        payload = open_document(data, kind=LATEST, keys=None, max_bytes=MAX_LATEST_BYTES).payload
    except BadSignature as error:
        raise UserError(
            f"damaged: {error}", place=str(place), remedy="remove the file and publish again"
        ) from error
    if not layout.is_version(payload.get("version")):
        raise UserError("damaged: no version", place=str(place), remedy="publish again")
    return payload["version"]


@lru_cache(maxsize=64)  # a manifest is written once, and pruning looks at all of them each time
def _stored(path: Path, run: str, identity: Identity | None) -> WeightsManifest:
    """Return a manifest of the store; `identity` distinguishes its file from an earlier one."""
    try:
        return open_manifest(read_bounded(path, MAX_BYTES), run=run, publishers=None)
    except BadSignature as error:
        raise UserError(
            f"damaged: {error}", place=str(path), remedy="remove the version's folder"
        ) from error


def _check_delta(directory: Path, version: int, files: Collection[str], base: int | None) -> None:
    if base is None:
        raise UserError(
            f"version {version} cannot be published without its files: it has no base",
            place=str(directory),
            remedy="name a base, or publish it whole",
        )
    if not files:
        raise UserError(
            f"no delta can be published: {TENSORS_NAME} names no files that hold the tensors",
            place=str(directory),
            remedy="export the version with `python -m bridge export`, or publish without a base",
        )
    if not (directory / DELTA_NAME).is_dir():
        delta = directory / DELTA_NAME
        raise UserError(
            f"there is no delta from version {base}",
            place=str(delta),
            remedy=f"make it with `python -m bridge diff BASE {directory} --out {delta}`",
        )


def _check_base(
    store: Path,
    run: str,
    base: int,
    version: int,
    files: Collection[str],
    publishers: Collection[str],
) -> None:
    """Check that the base is older, stored, of the same files and signed by a publisher."""
    path = store / layout.manifest_name(run, base)
    said = None
    if base >= version or not path.exists():
        said = f"base {base} is not an older published version"
    else:
        try:
            manifest = open_manifest(read_bounded(path, MAX_BYTES), run=run, publishers=publishers)
        except BadSignature as error:
            said = f"base {base} will not be believed: {error}"
        else:
            if set(manifest.files) != set(files):
                said = f"base {base} has other weights files than version {version}"
    if said is not None:
        raise UserError(
            said,
            place=str(path),
            remedy="name a base that is in the store, or publish an anchor (without --base)",
        )


def _write_manifest(
    store: Path, manifest: WeightsManifest, key: SigningKey, roles: bytes, chunks: ChunkWriter
) -> str:
    """Write a manifest unless it exists, and announce it; return its digest.

    roles.json is written, and latest.json unless it names the version or a newer one already.

    Raises:
        AlreadyPublished: another manifest of that version is there.
        UserError: no client would accept this one.
    """
    path = store / layout.manifest_name(manifest.run, manifest.version)
    data = sign_manifest(manifest, key)
    try:
        open_manifest(data, run=manifest.run, publishers={key.public_hex})
    except BadSignature as error:
        raise UserError(f"no client would accept version {manifest.version}: {error}") from error
    digest = digest_bytes(data)
    if not path.exists():
        write_atomic(path, data)
    elif (there := digest_bytes(read_bounded(path, MAX_BYTES))) != digest:
        raise AlreadyPublished(
            there,
            f"version {manifest.version} is published already, with other contents or by another "
            f"key ({there[:16]}, not {digest[:16]})",
            place=str(path),
            remedy="a version number is published once: publish under a newer one",
        )
    chunks.new.clear()  # the manifest names them: they stay, whatever fails from here on
    write_atomic(store / layout.roles_name(manifest.run), roles)
    newest = newest_version(store, run=manifest.run)
    if newest is None or newest < manifest.version:
        latest = sign_latest(manifest.run, manifest.version, digest, key)
        write_atomic(store / layout.latest_name(manifest.run), latest)
    return digest


def _tensors(path: Path) -> tuple[str | None, dict[str, dict[str, Any]], tuple[str, ...]]:
    if not path.exists():
        return None, {}, ()
    try:
        parsed = read_object(path, MAX_BYTES)
        return parsed["model_digest"], parsed["tensors"], tuple(parsed["files"])
    except (MalformedJson, KeyError) as error:
        raise UserError(
            f"malformed: {error}", place=str(path), remedy="export the version again"
        ) from error


def _files(directory: Path) -> list[Path]:
    if not directory.is_dir():
        raise UserError("not a directory", place=str(directory), remedy="export a version first")
    apart = {TENSORS_NAME, DELTA_NAME}
    paths = sorted(path for path in directory.iterdir() if path.name not in apart)
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
