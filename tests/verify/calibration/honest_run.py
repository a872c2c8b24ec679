"""A run directory as an honest run leaves it: spec, ledger, submissions, and published weights."""

from __future__ import annotations

import time
from pathlib import Path

from broadcast.store import publish
from runspec.core.files import write_atomic
from runspec.core.hashing import digest_bytes
from runspec.core.keys import SigningKey
from runspec.core.roles import sign_roles
from runspec.core.run_files import STATE_FILE, submission_files, weights_folder
from runspec.core.spec.resolved import FILE_NAME, dump_resolved
from runspec.core.spec.schema import RunSpec
from tests.verify.small_model import fixed_key
from verify.coordinator.ledger.ledger import Ledger
from verify.coordinator.machine.events import LeaseGranted, SubmissionReceived
from verify.formats.lease import Lease, lease_digest, sign_lease
from verify.formats.submission import Rollout, encode_rollouts, sign_submission

COORDINATOR, PUBLISHER, WORKER = fixed_key(2), fixed_key(3), fixed_key(1)


class HonestRun:
    """Writes a run directory; the caller samples."""

    def __init__(self, directory: Path, spec: RunSpec) -> None:
        self.directory, self.spec = directory, spec
        self._digests: dict[int, str] = {}
        self._leases = 0
        directory.mkdir(parents=True, exist_ok=True)
        write_atomic(directory / FILE_NAME, dump_resolved(spec))
        self._ledger = Ledger(directory / STATE_FILE)

    def weights(self, version: int) -> Path:
        """Where the files of a version are to be put before it is published."""
        folder = weights_folder(self.directory) / f"v{version}"
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def publish(self, version: int) -> None:
        held = {"publisher": PUBLISHER, "coordinator": COORDINATOR, "validator": COORDINATOR}
        keys = {role: [key.public_hex] for role, key in held.items()}
        roles = sign_roles(self.spec.name, keys, SigningKey.generate(), valid_s=1e6)
        self._digests[version] = publish(
            self.directory / "store" / "origin",
            self.weights(version),
            run=self.spec.name,
            version=version,
            key=PUBLISHER,
            roles=roles,
        )

    def lease(self, version: int, groups: int) -> tuple[bytes, Lease]:
        """The next lease of the first pool."""
        index, self._leases = self._leases, self._leases + 1
        lease = Lease(
            run=self.spec.name,
            step=version,
            nonce=f"{version + 1:064x}",
            worker=WORKER.public_hex,
            pool=self.spec.samplers[0].name,
            index=index,
            groups=groups,
            version=version,
            manifest_digest=self._digests[version],
            issued=0.0,
            expires=1e9,
        )
        return sign_lease(lease, COORDINATOR), lease

    def take(self, signed: bytes, lease: Lease, rollouts: list[Rollout]) -> None:
        """What the coordinator does with a submission."""
        table, digest = encode_rollouts(rollouts), lease_digest(signed)
        envelope = sign_submission(
            table, run=lease.run, step=lease.step, index=lease.index, lease=digest, key=WORKER
        )
        name = digest_bytes(table)
        files = submission_files(self.directory, lease.step, name)
        write_atomic(files.submission, table)
        write_atomic(files.submission_envelope, envelope)
        self._ledger.append(
            [
                LeaseGranted(time.time(), lease, digest, signed.decode()),
                SubmissionReceived(time.time(), digest, name, len(table)),
            ]
        )

    def close(self) -> None:
        self._ledger.close()
