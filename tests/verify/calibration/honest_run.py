"""A run directory as an honest run leaves it: spec, ledger, submissions, and published weights."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

from broadcast.store import publish
from runspec.core.canonical import digest_bytes
from runspec.core.files import write_atomic
from runspec.core.roles import sign_roles
from runspec.core.run_files import STATE_FILE, submission_files, weights_folder
from runspec.core.schema import RunSpec
from runspec.core.schema.load import FILE_NAME, dump_resolved
from runspec.core.signed import SigningKey
from tests.verify.bench import lease_for, packed
from tests.verify.small_model import fixed_key
from verify.coordinator.ledger import Ledger
from verify.coordinator.machine.events import LeaseGranted, SubmissionReceived
from verify.formats.lease import Lease, lease_digest, sign_lease
from verify.formats.submission import Rollout

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
        _, lease = lease_for(WORKER, COORDINATOR, step=version, index=index, version=version)
        pool, digest = self.spec.samplers[0].name, self._digests[version]
        lease = replace(lease, run=self.spec.name, pool=pool, groups=groups, manifest_digest=digest)
        return sign_lease(lease, COORDINATOR), lease

    def take(self, signed: bytes, lease: Lease, rollouts: list[Rollout]) -> None:
        """What the coordinator does with a submission."""
        envelope, table = packed(rollouts, signed, lease, WORKER)
        name, digest = digest_bytes(table), lease_digest(signed)
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
