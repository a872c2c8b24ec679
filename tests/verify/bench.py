"""One worker, one lease, one examiner: where submissions are made and judged in memory."""

from __future__ import annotations

from pathlib import Path

from runspec.core.signed import SigningKey
from tests.verify.small_model import (
    RUN,
    VOCAB,
    NumpyEngine,
    ParityTask,
    SmallModel,
    Worker,
    fixed_key,
    small_spec,
)
from verify.examiner import Examiner, SubmissionFile, Verdict
from verify.formats.lease import Lease, lease_digest, sign_lease
from verify.formats.submission import Rollout, encode_rollouts, sign_submission

MODEL = SmallModel.random(seed=3)
"""Policy version 0."""


class Bench:
    """A run of one pool; keyword arguments replace fields of the pool."""

    def __init__(self, directory: Path, task_set: ParityTask | None = None, **pool: object) -> None:
        self.spec = small_spec(**pool)
        self.worker_key, self.coordinator_key = fixed_key(1), fixed_key(2)
        self.task_set = task_set or ParityTask()
        self.engine = NumpyEngine({0: MODEL}, directory)
        self.prefill = True
        self.signed_lease, self.lease = lease_for(self.worker_key, self.coordinator_key)
        self.worker = Worker(self.worker_key, MODEL, self.spec, self.task_set)

    def honest(self) -> list[Rollout]:
        return self.rollouts_of(self.worker)

    def rollouts_of(self, worker: Worker) -> list[Rollout]:
        return worker.rollouts(self.signed_lease, self.lease)

    def packed(self, rollouts: list[Rollout]) -> tuple[bytes, bytes]:
        """Envelope and table, signed by the worker for the lease."""
        return packed(rollouts, self.signed_lease, self.lease, self.worker_key)

    def verdict(self, rollouts: list[Rollout]) -> Verdict:
        return self.verdict_on(*self.packed(rollouts))

    def verdict_on(self, envelope: bytes, table: bytes) -> Verdict:
        return self.examiner().examine([self.file(envelope, table)])[0]

    def file(self, envelope: bytes, table: bytes) -> SubmissionFile:
        return SubmissionFile(
            "cd" * 32, self.lease, lease_digest(self.signed_lease), envelope, table
        )

    def examiner(self) -> Examiner:
        return Examiner(
            self.spec,
            task_set=self.task_set,
            engine=self.engine,
            vocab_size=VOCAB,
            wants_prefill=lambda submission: self.prefill,
        )


def lease_for(
    worker: SigningKey,
    coordinator: SigningKey,
    *,
    step: int = 0,
    index: int = 0,
    version: int = 0,
    devices: str = "",
) -> tuple[bytes, Lease]:
    """A lease of two groups, signed."""
    lease = Lease(
        run=RUN,
        step=step,
        nonce=f"{step + 1:064x}",
        worker=worker.public_hex,
        pool="home",
        index=index,
        groups=2,
        version=version,
        manifest_digest="ab" * 32,
        issued=0.0,
        expires=1e9,
        devices=devices,
    )
    return sign_lease(lease, coordinator), lease


def envelope_of(table: bytes, signed_lease: bytes, lease: Lease, key: SigningKey) -> bytes:
    """A submission's envelope for any table."""
    names = {"run": lease.run, "step": lease.step, "index": lease.index}
    return sign_submission(table, **names, lease=lease_digest(signed_lease), key=key)


def packed(
    rollouts: list[Rollout], signed_lease: bytes, lease: Lease, key: SigningKey
) -> tuple[bytes, bytes]:
    """A submission's envelope and table."""
    table = encode_rollouts(rollouts)
    return envelope_of(table, signed_lease, lease, key), table
