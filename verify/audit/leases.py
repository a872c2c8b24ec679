"""The leases of a ledger: signatures, fresh nonces, seeds that nobody shares."""

from __future__ import annotations

from runspec.core.signed import BadSignature
from verify.audit.findings import Report
from verify.audit.signers import Signers
from verify.coordinator.machine.events import LeaseGranted, NonceDrawn
from verify.formats.lease import lease_digest, open_lease


class LeaseAudit:
    """Checks what the state machine does not: documents, and that nonces and seeds come once.

    Args:
        run: the run's name.
        report: gets the findings.
    """

    def __init__(self, run: str, report: Report) -> None:
        self._run, self._report = run, report
        self._seeds: dict[bytes, int] = {}
        self._nonces: set[str] = set()

    def drawn(self, row: int, event: NonceDrawn) -> None:
        fresh = event.nonce not in self._nonces
        self._report.require(fresh, row, "nonce", "one drawn before", "32 fresh bytes")
        self._nonces.add(event.nonce)

    def granted(self, row: int, event: LeaseGranted, signers: Signers) -> None:
        lease, require = event.lease, self._report.require
        self._check_document(row, event, signers)
        require(lease.run == self._run, row, "lease", f"run {lease.run}", f"run {self._run}")
        try:
            seed = lease.seed
        except (ValueError, OverflowError):
            self._report.add(row, "lease", "fields that give no seed", "a lease's")
            return
        before = self._seeds.setdefault(seed, row)
        require(before == row, row, "lease seed", f"that of row {before}", "a seed of its own")

    def _check_document(self, row: int, event: LeaseGranted, signers: Signers) -> None:
        data = event.document.encode("utf-8", "replace")
        digest = lease_digest(data)
        self._report.require(event.digest == digest, row, "lease digest", event.digest, digest)
        try:
            signed = open_lease(data, coordinators=signers.coordinators(data))
        except BadSignature as error:
            self._report.add(row, "lease signature", error, "the coordinator's signature")
            return
        self._report.require(
            signed == event.lease, row, "lease", f"{event.lease}", f"as it was signed, {signed}"
        )
