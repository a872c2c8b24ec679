"""From bytes to rows: signature, digest, lease and format. Nothing is believed before this."""

from __future__ import annotations

from runspec.core.hashing import digest_bytes
from runspec.core.signed import BadSignature
from verify.formats.lease import Lease
from verify.formats.submission import Rollout, decode_rollouts, open_submission
from verify.formats.tables import MalformedTable


class Rejected(Exception):
    """A submission of which no row can be examined.

    Args:
        check: the check that failed.
        reason: why.
    """

    def __init__(self, check: str, reason: str) -> None:
        self.check, self.reason = check, reason
        super().__init__(f"{check}: {reason}")


def open_rows(
    envelope: bytes,
    table: bytes,
    *,
    lease: Lease,
    lease_digest: str,
    max_rows: int,
    max_bytes: int,
) -> list[Rollout]:
    """The rows of a submission that is signed for this lease.

    Args:
        envelope: the signed submission envelope.
        table: the table's bytes.
        lease: the lease, whose signature has been checked.
        lease_digest: of the signed lease.
        max_rows: rows that an honest submission of the pool may have.
        max_bytes: bytes of the same.

    Raises:
        Rejected: `signature`, `lease` or `format`.
    """
    try:
        signed = open_submission(envelope)
    except BadSignature as error:
        raise Rejected("signature", str(error)) from error
    if signed.digest != digest_bytes(table) or signed.bytes != len(table):
        raise Rejected("signature", "the file is not the one that was signed")
    claimed = (signed.run, signed.step, signed.worker, signed.index, signed.lease)
    if claimed != (lease.run, lease.step, lease.worker, lease.index, lease_digest):
        raise Rejected("lease", "the envelope names another run, step, worker, index or lease")
    try:
        rollouts = decode_rollouts(table, max_rows=max_rows, max_bytes=max_bytes)
    except MalformedTable as error:
        raise Rejected("format", str(error)) from error
    if not rollouts:
        raise Rejected("format", "no rows")
    return rollouts
