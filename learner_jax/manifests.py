"""The coordinator's manifest of each step: waiting for it, and checking who signed it.

A run with samplers has manifests of groups (`learner_jax.batch`), a run that trains on documents
has manifests of packed rows.
"""

from __future__ import annotations

import logging
import time
from dataclasses import asdict
from pathlib import Path
from typing import Generic, Protocol, TypeVar, cast

from runspec.core.canonical import canonical_json, digest_bytes
from runspec.core.errors import UserError
from runspec.core.files import read_bounded
from runspec.core.roles import MAX_BYTES as MAX_ROLES_BYTES
from runspec.core.roles import Roles, open_roles
from runspec.core.run_files import step_folder
from runspec.core.schema import RunSpec
from runspec.core.signed import BadSignature
from verify.formats.batch import (
    FILE_NAME,
    MAX_RANGES_BYTES,
    BatchManifest,
    RangeManifest,
    open_batch,
    open_ranges,
    rows_per_step,
)
from verify.formats.batch import MAX_BYTES as MAX_BATCH_BYTES
from verify.formats.islands import without_empty_shares

POLL_S = 0.02
REPORT_EVERY_S = 30.0
REMEDY = "see the coordinator's log; a copy of the file from before the damage mends it"
M = TypeVar("M", BatchManifest, RangeManifest)


def own_share(manifest: BatchManifest | RangeManifest, island: str | None) -> slice:
    """Return what an island trains of a step: indices of its rows or of its groups.

    Args:
        manifest: of the step.
        island: its name; None for a run with one learner, which trains all.

    Raises:
        UserError: the manifest names no share for the island.
    """
    if island is None:
        if isinstance(manifest, RangeManifest):
            return slice(manifest.rows.first, manifest.rows.last)
        return slice(len(manifest.groups))
    for share in manifest.shares:
        if share.island == island:
            return slice(share.first, share.last)
    raise UserError(
        f"the manifest of step {manifest.step} names no share of island {island}",
        place="learner.islands",
        remedy="apply the same spec to the coordinator and to every island",
    )


def manifest_digest(manifest: BatchManifest | RangeManifest) -> str:
    """BLAKE3 of a manifest's canonical JSON, without its signature."""
    return digest_bytes(canonical_json(without_empty_shares(asdict(manifest))))


class StopSignal(Protocol):
    """A `threading.Event`, as one who waits sees it."""

    def is_set(self) -> bool: ...

    def wait(self, timeout: float) -> bool: ...


def open_manifest(
    data: bytes, *, spec: RunSpec, step: int, coordinators: frozenset[str] | None
) -> BatchManifest | RangeManifest:
    """Check the manifest of a step: of groups, or in a run on documents of rows.

    Raises:
        BadSignature: none of the coordinators signed it, or it is of another run or step.
    """
    if spec.supervised is None:
        return open_batch(data, coordinators=coordinators, run=spec.name, step=step)
    rows = rows_per_step(spec)
    return open_ranges(
        data, coordinators=coordinators, run=spec.name, step=step, rows_per_step=rows
    )


class ManifestReader(Generic[M]):
    """Waits for the manifests of a run.

    Args:
        run_dir: the run directory.
        spec: its resolved spec.
        root_public_key: pinned; signs `keys/roles.json`.

    Raises:
        UserError: the run's roles cannot be read.
    """

    def __init__(self, run_dir: Path, spec: RunSpec, root_public_key: str) -> None:
        self._run_dir, self._spec = run_dir, spec
        self._root_public_key = root_public_key
        self._roles = self._read_roles()

    def wait(self, step: int, stop: StopSignal, log: logging.Logger) -> M | None:
        """Waits for the manifest of a step; None when `stop` was set meanwhile.

        It waits as long as the coordinator does, which may wait for workers without end.

        Raises:
            UserError: it is not to be believed.
        """
        path = self._path(step)
        start = time.monotonic()
        report_at = start + REPORT_EVERY_S
        if stop.is_set():  # also where a replay finds one manifest after the other
            return None
        while not path.exists():
            if stop.wait(POLL_S):
                return None
            now = time.monotonic()
            if now > report_at:
                log.info("step %d: %.0f s waiting for the coordinator's batch", step, now - start)
                report_at = now + REPORT_EVERY_S
        return self.manifest(step)

    def manifest(self, step: int, *, signed: bool = True) -> M:
        """Reads and checks the manifest of a step.

        Args:
            step: its number.
            signed: whether the coordinator must have signed it.

        Raises:
            UserError: it is not the coordinator's, or breaks a promise of the spec.
        """
        path = self._path(step)
        coordinators = self._roles.coordinator if signed else None
        try:
            data = read_bounded(path, max(MAX_BATCH_BYTES, MAX_RANGES_BYTES))
            found = open_manifest(data, spec=self._spec, step=step, coordinators=coordinators)
        except (OSError, BadSignature) as error:
            raise UserError(str(error), place=str(path), remedy=REMEDY) from error
        self._check(cast(M, found), path)
        return cast(M, found)

    def _check(self, manifest: M, path: Path) -> None:
        """Raise UserError where a manifest breaks a promise of the spec."""

    def _path(self, step: int) -> Path:
        return step_folder(self._run_dir, step) / FILE_NAME

    def _read_roles(self) -> Roles:
        path = self._run_dir / "keys" / "roles.json"
        try:
            data = read_bounded(path, MAX_ROLES_BYTES)
            return open_roles(data, root_public_key=self._root_public_key, run=self._spec.name)
        except (OSError, BadSignature) as error:
            raise UserError(
                f"cannot read the run's roles: {error}",
                place=str(path),
                remedy="`runspec apply` makes it anew",
            ) from error
