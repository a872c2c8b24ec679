"""The batch manifest: exactly one a step, the coordinator's signed word on what the step trains."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from runspec.core.hashing import is_digest
from runspec.core.keys import SigningKey
from runspec.core.signed import BadSignature, open_document, sign_document

KIND = "batch"
FILE_NAME = "batch.json"
MAX_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True)
class BatchGroup:
    """One group to train on: where its tokens and where its rewards are."""

    submission: str
    verdict: str
    """Digest of the verdict file's table."""
    group: int
    step: int
    """The step that the lease was for; its folder holds the files."""
    version: int
    """The policy version that sampled it."""


@dataclass(frozen=True)
class BatchManifest:
    run: str
    step: int
    groups: list[BatchGroup]
    """In training order."""
    complete: bool
    """False when the step closed with fewer groups than asked for."""
    stats: dict[str, Any]
    """What the coordinator saw of the step, for the metrics (see `docs/coordinator.md`)."""
    ledger_rows: int
    """How many rows the ledger had when the step closed."""
    ledger_chain: str
    """The chain of the last of them: a signature over the ledger's whole past."""


def sign_batch(manifest: BatchManifest, key: SigningKey) -> bytes:
    return sign_document(KIND, asdict(manifest), key)


def open_batch(
    data: bytes, *, coordinators: frozenset[str] | None, run: str, step: int
) -> BatchManifest:
    """Checks a batch manifest and returns it.

    Args:
        data: the signed document.
        coordinators: keys that may have signed it; None where its contents are known otherwise.
        run, step: what it must be of.

    Raises:
        BadSignature: not the coordinator's, of another run or step, malformed, a group twice.
    """
    payload = open_document(data, kind=KIND, keys=coordinators, max_bytes=MAX_BYTES).payload
    if not isinstance(payload.get("groups"), list):
        raise BadSignature("batch: groups must be a list")
    try:
        groups = [BatchGroup(**group) for group in payload["groups"]]
        manifest = BatchManifest(**{**payload, "groups": groups})
    except (TypeError, KeyError) as error:
        raise BadSignature(f"batch: {error}") from error
    if manifest.run != run or manifest.step != step:
        of = f"{str(manifest.run)[:80]} step {str(manifest.step)[:20]}"
        raise BadSignature(f"batch: of {of}, not {run} step {step}")
    if not (type(manifest.step) is int and type(manifest.complete) is bool):
        raise BadSignature("batch: step must be a number, complete true or false")
    if not isinstance(manifest.stats, dict):
        raise BadSignature("batch: stats must be a map")
    if not all(
        type(n) is int and 0 <= n < 2**31 for g in groups for n in (g.group, g.step, g.version)
    ):
        raise BadSignature("batch: group, step and version must be natural numbers")
    if not all(is_digest(g.submission) and is_digest(g.verdict) for g in groups):
        raise BadSignature("batch: submission and verdict must be 64 hex characters")
    if len({(g.submission, g.group) for g in groups}) != len(groups):
        raise BadSignature("batch: a group is named twice")
    rows = manifest.ledger_rows
    if not (type(rows) is int and rows > 0 and is_digest(manifest.ledger_chain)):
        raise BadSignature("batch: ledger_rows must be a count and ledger_chain 64 hex characters")
    return manifest
