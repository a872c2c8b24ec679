"""Manifests of steps: the coordinator's signed statement of what a step trains, one a step.

A batch manifest names groups of rollouts. The manifest of a step that trains on documents names a
range of rows: row i of a run is a function of the spec and the documents, so two numbers name all
that the step trains. Step s has the rows [s R, (s + 1) R), where R is `rows_per_step`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Annotated, Any

from pydantic import Field, TypeAdapter

from runspec.core.schema import RunSpec
from runspec.core.signed import (
    STRICT,
    BadSignature,
    Digest,
    Natural,
    SigningKey,
    open_payload,
    sign_document,
)
from verify.formats.islands import IslandShare, check_shares, without_empty_shares
from verify.formats.lease import Lease

KIND = "batch"
FILE_NAME = "batch.json"
MAX_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True)
class BatchGroup:
    """One group to train on: where its tokens and its rewards are."""

    __pydantic_config__ = STRICT

    submission: Digest
    verdict: Digest
    """Digest of the verdict file's table."""
    group: Natural
    step: Natural
    """Step of the lease; its folder holds the files."""
    version: Natural
    """Policy version that sampled the group."""

    @classmethod
    def of(cls, lease: Lease, submission: str, verdict: str, group: int) -> BatchGroup:
        """Return a group of a lease."""
        return cls(submission, verdict, group, lease.step, lease.version)


@dataclass(frozen=True)
class BatchManifest:
    __pydantic_config__ = STRICT

    run: str
    step: Natural
    groups: list[BatchGroup]
    """In training order."""
    complete: bool
    """False if the step closed with fewer groups than `prompts_per_step`."""
    stats: dict[str, Any]
    """Statistics of the step, for the metrics (see `docs/coordinator.md`)."""
    ledger_rows: Annotated[int, Field(gt=0)]
    """Number of rows that the ledger had when the step closed."""
    ledger_chain: Digest
    """Chain of the last of these rows; so the signature covers the whole ledger before."""
    shares: list[IslandShare] = field(default_factory=list)
    """Positions in `groups` of each learner island, in the order of the spec; empty for one
    learner."""


_CODEC = TypeAdapter(BatchManifest)


def sign_batch(manifest: BatchManifest, key: SigningKey) -> bytes:
    return sign_document(KIND, without_empty_shares(asdict(manifest)), key)


def open_batch(
    data: bytes, *, coordinators: frozenset[str] | None, run: str, step: int
) -> BatchManifest:
    """Check a batch manifest and return it.

    Args:
        data: the signed document.
        coordinators: keys that may have signed it; None if its contents are known to be right.
        run, step: run and step of the manifest.

    Raises:
        BadSignature: it is not signed by a coordinator, is of another run or step, is malformed, or
            has a group twice, or has shares that do not divide its groups.
    """
    manifest, _ = open_payload(_CODEC, data, kind=KIND, keys=coordinators, max_bytes=MAX_BYTES)
    if manifest.run != run or manifest.step != step:
        of = f"{manifest.run[:80]} step {manifest.step}"
        raise BadSignature(f"batch: of {of}, not {run} step {step}")
    if len({(g.submission, g.group) for g in manifest.groups}) != len(manifest.groups):
        raise BadSignature("batch: a group is named twice")
    check_shares("batch", manifest.shares, 0, len(manifest.groups))
    return manifest


RANGES_KIND = "ranges"
MAX_RANGES_BYTES = 256 * 1024
_Row = Annotated[int, Field(ge=0, lt=2**53)]


@dataclass(frozen=True)
class RowRange:
    """Packed rows [first, last) of a run."""

    __pydantic_config__ = STRICT

    first: _Row
    last: _Row

    @classmethod
    def of_step(cls, step: int, rows_per_step: int) -> RowRange:
        """Return the rows of a step."""
        return cls(step * rows_per_step, (step + 1) * rows_per_step)


@dataclass(frozen=True)
class RangeManifest:
    """What a step trains; it lies where a `BatchManifest` of a run with samplers does."""

    __pydantic_config__ = STRICT

    run: str
    step: Natural
    rows: RowRange
    ledger_rows: Annotated[int, Field(gt=0)]
    """Number of rows that the ledger had when the manifest was signed."""
    ledger_chain: Digest
    """Chain of the last of these rows; so the signature covers the whole ledger before."""
    shares: list[IslandShare] = field(default_factory=list)
    """Rows of each learner island, in the order of the spec; empty for one learner."""


_RANGES = TypeAdapter(RangeManifest)


def rows_per_step(spec: RunSpec) -> int:
    """Return the packed rows of a step; 0 for a run with samplers."""
    algorithm = spec.supervised
    if algorithm is None:
        return 0
    return algorithm.updates_per_step * algorithm.tokens_per_update // spec.learner.packing.tokens


def sign_ranges(manifest: RangeManifest, key: SigningKey) -> bytes:
    return sign_document(RANGES_KIND, without_empty_shares(asdict(manifest)), key)


def open_ranges(
    data: bytes,
    *,
    coordinators: frozenset[str] | None,
    run: str,
    step: int,
    rows_per_step: int,
) -> RangeManifest:
    """Check a manifest of rows and return it.

    Args:
        data: the signed document.
        coordinators: keys that may have signed it; None if its contents are known to be right.
        run, step: run and step of the manifest.
        rows_per_step: rows of each step of the run.

    Raises:
        BadSignature: it is not signed by a coordinator, is of another run or step, is malformed, or
            does not name the rows of its step, or has shares that do not divide them.
    """
    manifest, _ = open_payload(
        _RANGES, data, kind=RANGES_KIND, keys=coordinators, max_bytes=MAX_RANGES_BYTES
    )
    if manifest.run != run or manifest.step != step:
        of = f"{manifest.run[:80]} step {manifest.step}"
        raise BadSignature(f"ranges: of {of}, not {run} step {step}")
    found, expected = manifest.rows, RowRange.of_step(step, rows_per_step)
    if found != expected:
        raise BadSignature(
            f"ranges: rows {found.first} to {found.last} in step {step}, which has "
            f"{expected.first} to {expected.last}"
        )
    check_shares("ranges", manifest.shares, found.first, found.last)
    return manifest
