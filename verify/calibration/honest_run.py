"""The submissions and policy versions that an honest run left in its directory.

A prefill engine without a network is given a cache that holds every version already, so it asks no
server. The cache holds links to the run's files, whose digests are checked.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runspec.core.canonical import MalformedJson, parse_object
from runspec.core.errors import UserError
from runspec.core.files import read_bounded
from runspec.core.hashing import digest_bytes, digest_file, is_digest
from runspec.core.run_files import SubmissionFiles, submission_files, weights_folder
from runspec.core.spec.schema import RunSpec
from verify.checks.rows import Rejected, open_rows
from verify.coordinator.ledger.ledger import read_events
from verify.coordinator.machine.events import LeaseGranted, SubmissionReceived
from verify.formats.lease import Lease
from verify.formats.submission import (
    MAX_ENVELOPE_BYTES,
    Rollout,
    max_submission_bytes,
    max_submission_rows,
)
from verify.plugins import PrefillEngine, WeightsLocation, load_prefill_engine

NO_SERVER = "http://127.0.0.1:1"
"""Address of no server: the cache holds every version, so it is never asked."""
_MANIFEST = "manifest.json"
_MAX_MANIFEST_BYTES = 256 * 1024 * 1024


@dataclass(frozen=True)
class Taken:
    """A submission that the coordinator received, whatever its verdict."""

    submission: str
    lease: Lease
    lease_digest: str
    files: SubmissionFiles


def submissions_of(run_dir: Path, spec: RunSpec, pool: str) -> list[Taken]:
    """Return the submissions of a pool whose files are still there, by version, then as received.

    Rejected submissions are included: without them, what an honest pool is rejected for is hidden.

    Raises:
        UserError: the ledger cannot be read.
    """
    granted = read_events(run_dir, spec, LeaseGranted)
    leases = {event.digest: event.lease for event in granted if event.lease.pool == pool}
    found: list[Taken] = []
    for event in read_events(run_dir, spec, SubmissionReceived):
        lease = leases.get(event.lease)
        if lease is not None and is_digest(event.submission):
            files = submission_files(run_dir, lease.step, event.submission)
            if files.submission.is_file() and files.submission_envelope.is_file():
                found.append(Taken(event.submission, lease, event.lease, files))
    return sorted(found, key=lambda taken: taken.lease.version)


def rollouts_of(taken: Taken, spec: RunSpec) -> Iterator[Rollout]:
    """Yield the rollouts that one version sampled, which a prefill can reproduce.

    Raises:
        UserError: the files are not those of the lease, so the run is not honest.
    """
    pool = next(pool for pool in spec.samplers if pool.name == taken.lease.pool)
    try:
        rows = open_rows(
            read_bounded(taken.files.submission_envelope, MAX_ENVELOPE_BYTES),
            read_bounded(taken.files.submission, max_submission_bytes(spec, pool)),
            lease=taken.lease,
            lease_digest=taken.lease_digest,
            max_rows=max_submission_rows(spec, pool),
            max_bytes=max_submission_bytes(spec, pool),
        )
    except (OSError, Rejected) as error:
        raise dishonest(taken, error) from error
    for number, row in enumerate(rows):
        if not 0 < len(row.output_tokens) == len(row.logprobs):
            raise dishonest(taken, f"row {number} has no log-prob for each token")
        if row.is_of_its_version:
            yield row


def dishonest(taken: Taken, reason: object) -> UserError:
    """Return the error of a submission that no honest worker sends."""
    return UserError(
        f"not an honest submission: {reason}",
        place=str(taken.files.submission),
        remedy="name the directory of a run whose workers were all your own",
    )


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
    """Find the version whose manifest has the digest; None if it is gone.

    Args:
        run_dir: has weights/v<N>, and the origin's store with the manifest.
        run: name of the run.
        number: N.
        digest: manifest digest that the leases name.
        fetched: folder of v<N>, each with its manifest.json, as of a validator; if given, only it
            is searched.
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
    """Link all files of a version into a cache; files that the manifest lists are checked.

    If a version was published only as a delta, its manifest lists no files of tensors.

    Raises:
        UserError: a file does not have the digest of the manifest.
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
    """Return the spec's prefill engine, over a cache that holds every version it needs."""
    location = WeightsLocation(spec.name, [NO_SERVER], "0" * 64, cache)
    return load_prefill_engine(spec, location)


def _objects(manifest: Path) -> Mapping[str, str]:
    """Return the BLAKE3 digest of each file that a manifest lists, by name."""
    try:
        data = read_bounded(manifest, _MAX_MANIFEST_BYTES)
        objects: Any = parse_object(data, max_bytes=_MAX_MANIFEST_BYTES)["payload"]["objects"]
        found = {str(name): str(each["blake3"]) for name, each in objects.items()}
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
