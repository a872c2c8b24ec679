"""Policy versions for a prefill engine without a network: from a run directory, checked.

An engine is given a cache of its own that holds every version already, so that it asks nobody. What
lies in it are links to the run's files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runspec.core.canonical import MalformedJson, parse_object
from runspec.core.errors import UserError
from runspec.core.files import read_bounded
from runspec.core.hashing import digest_bytes, digest_file
from runspec.core.run_files import weights_folder
from runspec.core.spec.schema import RunSpec
from verify.plugins import PrefillEngine, WeightsLocation, load_prefill_engine

NOBODY = "http://127.0.0.1:1"
"""Asked only where the cache lacks a version, which it does not."""
_MANIFEST = "manifest.json"
_MAX_MANIFEST_BYTES = 256 * 1024 * 1024


@dataclass(frozen=True)
class Version:
    """A policy version on this machine."""

    number: int
    manifest: Path
    folder: Path
    """Holds the files that the manifest names."""


def find_version(
    run_dir: Path, run: str, number: int, digest: str, fetched: Path | None
) -> Version | None:
    """Where a version lies whose manifest has the digest; None where it is gone.

    Args:
        run_dir: has weights/v<N>, and the origin's store with the manifest.
        run: the run's name.
        number: N.
        digest: that the leases name.
        fetched: a folder of v<N>, each with its manifest.json, as validators keep them; it is
            looked at instead.
    """
    folder = (fetched or weights_folder(run_dir)) / f"v{number}"
    stored = run_dir / "store" / "origin" / run / "versions" / str(number) / _MANIFEST
    manifest = folder / _MANIFEST if fetched is not None else stored
    try:
        if digest_bytes(read_bounded(manifest, _MAX_MANIFEST_BYTES)) != digest:
            return None
    except OSError:
        return None
    return Version(number, manifest, folder) if folder.is_dir() else None


def place(version: Version, cache: Path) -> Path:
    """Puts a version into a cache: all its files, those that the manifest lists checked.

    It lists none of the tensors' files of a version that was published as a delta alone.

    Raises:
        UserError: a file is not what the manifest says.
    """
    target = cache / f"v{version.number}"
    target.mkdir(parents=True)
    for name, digest in _objects(version.manifest).items():
        source = version.folder / name
        try:
            same = digest_file(source) == digest
        except OSError as error:
            raise _damaged(source, error.strerror or str(error)) from error
        if not same:
            raise _damaged(source, "other bytes than were published")
    for source in version.folder.iterdir():
        if source.is_file() and source.name != _MANIFEST:
            (target / source.name).symlink_to(source.resolve())
    (target / _MANIFEST).symlink_to(version.manifest.resolve())
    return target


def engine_over(spec: RunSpec, cache: Path) -> PrefillEngine:
    """The prefill engine that the spec names, over a cache that holds all that it is asked for."""
    location = WeightsLocation(spec.name, [NOBODY], "0" * 64, cache)
    return load_prefill_engine(spec, location)


def _objects(manifest: Path) -> Mapping[str, str]:
    """BLAKE3 by the name of each file that a manifest lists."""
    try:
        data = read_bounded(manifest, _MAX_MANIFEST_BYTES)
        objects: Any = parse_object(data, max_bytes=_MAX_MANIFEST_BYTES)["payload"]["objects"]
        found = {str(name): str(said["blake3"]) for name, said in objects.items()}
    except (MalformedJson, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"no manifest: {error}", place=str(manifest)) from error
    for name in found:
        if Path(name).name != name:
            raise UserError(f"names a file {name[:80]!r}", place=str(manifest))
    return found


def _damaged(path: Path, reason: str) -> UserError:
    return UserError(
        f"cannot be used: {reason}",
        place=str(path),
        remedy="name a folder of whole versions with --weights, as a validator's --dir has",
    )
