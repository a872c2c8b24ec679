"""The leases of a ledger: signatures, nonces, indices without holes, seeds that nobody shares."""

from __future__ import annotations

from collections import defaultdict

from runspec.core.signed import BadSignature
from verify.audit.findings import Report
from verify.audit.signers import Signers
from verify.coordinator.events import LeaseGranted, NonceDrawn, WorkerRegistered
from verify.formats.lease import Lease, lease_digest, open_lease


class LeaseAudit:
    """Counts anew what the coordinator promises of leases; knows nothing of its state machine.

    Args:
        run: the run's name.
        report: gets the findings.
    """

    def __init__(self, run: str, report: Report) -> None:
        self._run, self._report = run, report
        self._seeds: dict[bytes, int] = {}
        self.rolled_back()

    def rolled_back(self) -> None:
        """Keys, nonces and indices begin anew; seeds that were used stay used."""
        self._numbers: dict[str, int] = {}
        self._nonces: set[str] = set()
        self._draws: dict[int, list[tuple[str, int]]] = defaultdict(list)
        self._indices: dict[tuple[int, str], int] = defaultdict(int)

    def registered(self, event: WorkerRegistered) -> None:
        self._numbers.setdefault(event.worker, len(self._numbers))

    def drawn(self, row: int, event: NonceDrawn) -> None:
        fresh = event.nonce not in self._nonces
        self._report.require(fresh, row, "nonce", "one drawn before", "32 fresh bytes")
        self._nonces.add(event.nonce)
        self._draws[event.step].append((event.nonce, event.workers))

    def granted(self, row: int, event: LeaseGranted, signers: Signers) -> None:
        lease, require = event.lease, self._report.require
        self._check_document(row, event, signers)
        require(lease.run == self._run, row, "lease", f"run {lease.run}", f"run {self._run}")
        self._check_nonce(row, lease)
        index = self._indices[lease.step, lease.worker]
        require(
            lease.index == index, row, "lease index", lease.index, f"{index}: indices have no holes"
        )
        self._indices[lease.step, lease.worker] = index + 1
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

    def _check_nonce(self, row: int, lease: Lease) -> None:
        number = self._numbers.get(lease.worker)
        if number is None:
            self._report.add(row, "lease", f"worker {lease.worker}", "a registered key")
            return
        covering = (nonce for nonce, workers in self._draws[lease.step] if number < workers)
        nonce = next(covering, "none")
        self._report.require(
            lease.nonce == nonce,
            row,
            "lease nonce",
            lease.nonce,
            f"{nonce}, the first drawn for the step after the key was registered",
        )
