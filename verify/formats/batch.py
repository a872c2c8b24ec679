"""Manifests of steps, and the documents of learner islands: shares, offers, commit records.

A manifest is the coordinator's signed statement of what a step trains, one a step. A batch manifest
names groups of rollouts. The manifest of a step that trains on documents names a range of rows: row
i of a run is a function of the spec and the documents, so two numbers name all that the step
trains. Step s has the rows [s R, (s + 1) R), where R is `rows_per_step`.

An island's *share* of a step is the update that it offers to the others: the outer parameters minus
its own after its inner updates, encoded. The same word names its part of a step's data in a batch
manifest (`IslandShare`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, Field, TypeAdapter, ValidationError

from runspec.core.address import is_server_url
from runspec.core.schema import RunSpec
from runspec.core.schema.fields import NAME_PATTERN
from runspec.core.signed import (
    STRICT,
    BadSignature,
    Digest,
    Natural,
    SigningKey,
    open_payload,
    sign_document,
)
from verify.formats.lease import Lease

T = TypeVar("T")

OFFER_KIND = "share"
COMMIT_KIND = "commit"
MAX_OFFER_BYTES = 4 * 1024
MAX_RECORD_BYTES = 2 * 1024 * 1024
_MAX_URL = 400


def _server_url(text: str) -> str:
    if len(text) > _MAX_URL or not is_server_url(text):
        raise ValueError(f"a server's URL of at most {_MAX_URL} characters is needed")
    return text


_Island = Annotated[str, Field(pattern=NAME_PATTERN)]
_Url = Annotated[str, AfterValidator(_server_url)]
_Number = Annotated[float, Field(ge=0.0, lt=2.0**53)]
_Bytes = Annotated[int, Field(gt=0, lt=2**53)]
_Position = Annotated[int, Field(ge=0, lt=2**53)]


@dataclass(frozen=True)
class IslandShare:
    """Part [first, last) of a step's rows or groups that one island trains on."""

    __pydantic_config__ = STRICT

    island: _Island
    first: _Position
    """A row of the run, or a position in the manifest's `groups`."""
    last: _Position


def divide(first: int, last: int, names: Sequence[str]) -> list[IslandShare]:
    """Divide [first, last) among islands, in their order, as evenly as whole numbers allow.

    Island i of n gets [first + round(i R / n), first + round((i + 1) R / n)), where R = last -
    first and halves are rounded up. With fewer rows than islands some parts are empty.

    Args:
        first, last: rows or groups of the step.
        names: islands in the order of the spec.
    """
    n, size = len(names), last - first
    ends = [first + (2 * i * size + n) // (2 * n) for i in range(n + 1)] if n else []
    return [IslandShare(name, ends[i], ends[i + 1]) for i, name in enumerate(names)]


def check_shares(kind: str, shares: Sequence[IslandShare], first: int, last: int) -> None:
    """Check that a manifest's shares divide its rows or groups; no shares are right too.

    Raises:
        BadSignature: they do not, or an island is named twice.
    """
    names = [share.island for share in shares]
    if len(set(names)) != len(names):
        raise BadSignature(f"{kind}: an island is named twice")
    if list(shares) != divide(first, last, names):
        raise BadSignature(f"{kind}: the islands' shares do not divide {first} to {last}")


def without_empty_shares(payload: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a manifest as they are signed.

    A manifest of a run with one learner has no field `shares`.
    """
    return {name: value for name, value in payload.items() if name != "shares" or value}


@dataclass(frozen=True)
class Contribution:
    """A share that counts; the fields are those of its offer."""

    __pydantic_config__ = STRICT

    island: _Island
    url: _Url
    """Server of the island's store."""
    manifest: Digest
    """Digest of the manifest of the share's object in the store."""
    share: Digest
    """Digest of `share.bin`."""
    bytes: _Bytes
    """Size of `share.bin`."""
    weight: _Number
    """Loss denominator over the step: the share's weight in the mean."""
    norm: _Number
    """L2 norm of the decoded share."""

    @classmethod
    def of(cls, offer: Contribution) -> Contribution:
        return cls(**{each.name: getattr(offer, each.name) for each in fields(cls)})


@dataclass(frozen=True)
class ShareOffered(Contribution):
    """An island's offer of its share of a step; the island signs it."""

    run: str
    step: Natural
    base: Digest
    """Digest of the outer state of version `step`, from which the updates started."""
    data: Digest | Annotated[str, Field(max_length=0)]
    """Digest of the corpus; empty where there is none."""


@dataclass(frozen=True)
class StoredOuter:
    """The newest outer state in an island's store, from which another island can join."""

    __pydantic_config__ = STRICT

    island: _Island
    url: _Url
    """Server of the store."""
    version: Natural
    digest: Digest
    """Digest of the outer state."""


@dataclass(frozen=True)
class OuterStates:
    """Where an island can begin."""

    __pydantic_config__ = STRICT

    stored: list[StoredOuter]
    committed: Natural
    """Steps that are committed: the newest version of the outer state."""
    oldest: Natural
    """The oldest step whose record is served; `committed` if none is. After a rollback older
    records are not served any more."""


@dataclass(frozen=True)
class Dropped:
    """An island whose work on a step does not count."""

    __pydantic_config__ = STRICT

    island: _Island
    reason: Annotated[str, Field(max_length=400)]


@dataclass(frozen=True)
class CommitRecord:
    """The coordinator's statement of which shares make the next version: one a step."""

    __pydantic_config__ = STRICT

    run: str
    step: Natural
    base: Digest
    """Digest of the outer state from which all contributors started."""
    codec: Annotated[str, Field(max_length=40)]
    """`learner.islands.codec.kind`."""
    contributors: Annotated[list[Contribution], Field(min_length=1)]
    """In the order of the spec, which is the order of the sum."""
    dropped: list[Dropped]
    """In the order of the spec."""
    previous: Digest | None
    """Digest of the signed record before; None for the first."""
    ledger_rows: Annotated[int, Field(gt=0)]
    """Number of rows that the ledger had when the step was committed."""
    ledger_chain: Digest
    """Chain of the last of these rows."""


_OFFER = TypeAdapter(ShareOffered)
_RECORD = TypeAdapter(CommitRecord)
STORED = TypeAdapter(StoredOuter)
OUTER_STATES = TypeAdapter(OuterStates)


def read_outer(data: bytes, *, kind: TypeAdapter[T]) -> T:
    """Read what an island announces (`STORED`), or where an island can begin (`OUTER_STATES`).

    Raises:
        BadSignature: it is malformed.
    """
    try:
        return kind.validate_json(data)
    except ValidationError as error:
        raise BadSignature(f"outer states: {error.errors()[0]['msg'][:120]}") from error


def sign_offer(offer: ShareOffered, key: SigningKey) -> bytes:
    return sign_document(OFFER_KIND, asdict(offer), key)


def open_offer(data: bytes, *, keys: Mapping[str, str], run: str) -> ShareOffered:
    """Check an offer and return it.

    Args:
        data: the signed document.
        keys: public key of each island by its name (`Roles.islands`).
        run: name of the run.

    Raises:
        BadSignature: it is not signed by the island that it names, is of another run, or is
            malformed.
    """
    offer, key = open_payload(
        _OFFER, data, kind=OFFER_KIND, keys=frozenset(keys.values()), max_bytes=MAX_OFFER_BYTES
    )
    if offer.run != run:
        raise BadSignature(f"{OFFER_KIND}: of run {offer.run[:80]}, not {run}")
    if keys.get(offer.island) != key:
        raise BadSignature(f"{OFFER_KIND}: of island {offer.island}, signed by another island")
    return offer


def sign_commit(record: CommitRecord, key: SigningKey) -> bytes:
    return sign_document(COMMIT_KIND, asdict(record), key)


def open_commit(data: bytes, *, coordinators: frozenset[str], run: str, step: int) -> CommitRecord:
    """Check a commit record and return it.

    Args:
        data: the signed document.
        coordinators: keys that may have signed it.
        run, step: run and step of the record.

    Raises:
        BadSignature: it is not signed by a coordinator, is of another run or step, is malformed,
            names an island twice, or has no weight.
    """
    record, _ = open_payload(
        _RECORD, data, kind=COMMIT_KIND, keys=coordinators, max_bytes=MAX_RECORD_BYTES
    )
    _require_step(COMMIT_KIND, record, run, step)
    names = [each.island for each in record.contributors]
    names += [each.island for each in record.dropped]
    if len(set(names)) != len(names):
        raise BadSignature(f"{COMMIT_KIND}: an island is named twice")
    if not sum(each.weight for each in record.contributors) > 0.0:
        raise BadSignature(f"{COMMIT_KIND}: the weights of its shares are 0")
    return record


# -- Manifests of steps ---------------------------------------------------------------------------

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
    _require_step(KIND, manifest, run, step)
    if len({(g.submission, g.group) for g in manifest.groups}) != len(manifest.groups):
        raise BadSignature("batch: a group is named twice")
    check_shares("batch", manifest.shares, 0, len(manifest.groups))
    return manifest


RANGES_KIND = "ranges"
MAX_RANGES_BYTES = 256 * 1024


@dataclass(frozen=True)
class RowRange:
    """Packed rows [first, last) of a run."""

    __pydantic_config__ = STRICT

    first: _Position
    last: _Position

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
    _require_step(RANGES_KIND, manifest, run, step)
    found, expected = manifest.rows, RowRange.of_step(step, rows_per_step)
    if found != expected:
        raise BadSignature(
            f"ranges: rows {found.first} to {found.last} in step {step}, which has "
            f"{expected.first} to {expected.last}"
        )
    check_shares("ranges", manifest.shares, found.first, found.last)
    return manifest


def _require_step(
    kind: str, found: CommitRecord | BatchManifest | RangeManifest, run: str, step: int
) -> None:
    if found.run != run or found.step != step:
        of = f"{found.run[:80]} step {found.step}"
        raise BadSignature(f"{kind}: of {of}, not {run} step {step}")
