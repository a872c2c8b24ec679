"""latest.json: the publisher's short-lived statement of the newest policy version."""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import asdict, dataclass

from runspec.core.hashing import is_digest
from runspec.core.keys import SigningKey
from runspec.core.signed import BadSignature, check_times, open_document, sign_document

KIND = "latest"
MAX_BYTES = 4 * 1024
VALID_S = 600.0
RESIGN_EVERY_S = 60.0


@dataclass(frozen=True)
class Latest:
    """The newest published version; times are seconds since the epoch."""

    run: str
    version: int
    manifest_digest: str
    issued: float
    expires: float


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
    payload = open_document(data, kind=KIND, keys=publishers, max_bytes=MAX_BYTES).payload
    try:
        latest = Latest(**payload)
    except TypeError as error:
        raise BadSignature(f"latest: {error}") from error
    if latest.run != run:
        raise BadSignature(f"latest: of run {str(latest.run)[:80]!r}, not {run!r}")
    if (
        type(latest.version) is not int
        or latest.version < 0
        or not is_digest(latest.manifest_digest)
    ):
        raise BadSignature("latest: version or manifest_digest is malformed")
    check_times(KIND, latest.issued, latest.expires, time.time())
    return latest
