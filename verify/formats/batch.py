"""The batch manifest: exactly one a step, the coordinator's signed word on what the step trains."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Annotated, Any

from pydantic import Field, TypeAdapter

from runspec.core.keys import SigningKey
from runspec.core.signed import BadSignature, open_document, sign_document
from verify.formats.payload import STRICT, Digest, Natural, open_payload

KIND = "batch"
FILE_NAME = "batch.json"
MAX_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True)
class BatchGroup:
    """One group to train on: where its tokens and where its rewards are."""

    __pydantic_config__ = STRICT

    submission: Digest
    verdict: Digest
    """Digest of the verdict file's table."""
    group: Natural
    step: Natural
    """The step that the lease was for; its folder holds the files."""
    version: Natural
    """The policy version that sampled it."""


@dataclass(frozen=True)
class BatchManifest:
    __pydantic_config__ = STRICT

    run: str
    step: Natural
    groups: list[BatchGroup]
    """In training order."""
    complete: bool
    """False when the step closed with fewer groups than asked for."""
    stats: dict[str, Any]
    """Statistics of the step, for the metrics (see `docs/coordinator.md`)."""
    ledger_rows: Annotated[int, Field(gt=0)]
    """How many rows the ledger had when the step closed."""
    ledger_chain: Digest
    """The chain of the last of them: a signature over the ledger's whole past."""


_CODEC = TypeAdapter(BatchManifest)


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
    manifest = open_payload(_CODEC, payload, KIND)
    if manifest.run != run or manifest.step != step:
        of = f"{manifest.run[:80]} step {manifest.step}"
        raise BadSignature(f"batch: of {of}, not {run} step {step}")
    if len({(g.submission, g.group) for g in manifest.groups}) != len(manifest.groups):
        raise BadSignature("batch: a group is named twice")
    return manifest
