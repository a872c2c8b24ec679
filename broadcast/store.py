"""The store: versions of a run as static files, so that any HTTP server can serve them."""

from __future__ import annotations

from pathlib import Path

from runspec.common.keys import SigningKey

CHUNK_BYTES = 16 * 1024 * 1024


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

    Returns:
        The manifest digest.

    Raises:
        UserError: the version was published with other contents, an unusable file name, disk full.
    """
    raise NotImplementedError


def refresh_latest(store: Path, *, run: str, key: SigningKey) -> None:
    """Signs latest.json again, so that it does not expire; nothing where none is published."""
    raise NotImplementedError


def prune(store: Path, *, run: str, keep_versions: int) -> None:
    """Removes all but the newest `keep_versions` versions and the bases that they need."""
    raise NotImplementedError


def newest_version(store: Path, *, run: str) -> int | None:
    """The version that latest.json names; None where none is published."""
    raise NotImplementedError
