"""latest.json: the publisher's short-lived statement of the newest policy version."""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import asdict, dataclass

from pydantic import TypeAdapter

from runspec.core.roles import check_times
from runspec.core.signed import (
    STRICT,
    BadSignature,
    Digest,
    Natural,
    SigningKey,
    Time,
    open_payload,
    sign_document,
)

KIND = "latest"
MAX_BYTES = 4 * 1024
VALID_S = 600.0
RESIGN_EVERY_S = 60.0


@dataclass(frozen=True)
class Latest:
    """The newest published version; times are seconds since the epoch."""

    __pydantic_config__ = STRICT

    run: str
    version: Natural
    manifest_digest: Digest
    issued: Time
    expires: Time


_CODEC = TypeAdapter(Latest)


def sign_latest(run: str, version: int, manifest_digest: str, key: SigningKey) -> bytes:
    now = time.time()
    return sign_document(
        KIND, asdict(Latest(run, version, manifest_digest, now, now + VALID_S)), key
    )


def open_latest(data: bytes, *, run: str, publishers: Collection[str]) -> Latest:
    """Check a latest.json.

    Raises:
        BadSignature: not signed by a publisher, of another run, expired, from the future, or
            malformed.
    """
    latest, _ = open_payload(_CODEC, data, kind=KIND, keys=publishers, max_bytes=MAX_BYTES)
    if latest.run != run:
        raise BadSignature(f"latest: of run {latest.run[:80]!r}, not {run!r}")
    check_times(KIND, latest.issued, latest.expires, time.time())
    return latest
