"""The submissions of a run directory, with their leases: what an honest run left behind."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from runspec.core.errors import UserError
from runspec.core.files import read_bounded
from runspec.core.hashing import is_digest
from runspec.core.run_files import SubmissionFiles, submission_files
from runspec.core.spec.schema import RunSpec
from verify.audit.snapshot import open_snapshot
from verify.checks.intake import Rejected, open_rows
from verify.coordinator.machine.events import LeaseGranted, SubmissionReceived
from verify.formats.lease import Lease
from verify.formats.submission import MAX_ENVELOPE_BYTES, Rollout
from verify.ledger import BadRow, decode_event
from verify.limits import max_submission_bytes, max_submission_rows

_KINDS = (b"LeaseGranted", b"SubmissionReceived")


@dataclass(frozen=True)
class Taken:
    """A submission that the coordinator took in, whatever was judged of it."""

    submission: str
    lease: Lease
    lease_digest: str
    files: SubmissionFiles


def submissions_of(run_dir: Path, spec: RunSpec, pool: str) -> list[Taken]:
    """Those of a pool whose files are still there, by version and then as they came.

    What was rejected is among them: leaving it out would hide what an honest pool is rejected for.

    Raises:
        UserError: the ledger cannot be read.
    """
    leases: dict[str, Lease] = {}
    found: list[Taken] = []
    with closing(open_snapshot(run_dir, spec)) as snapshot:
        for row in snapshot.rows():
            if row.kind not in _KINDS:
                continue
            try:
                event = decode_event(row.kind, row.body)
            except BadRow as error:
                raise UserError(
                    f"row {row.seq} of the ledger is damaged: {error}",
                    place=str(run_dir),
                    remedy=f"`python -m verify audit {run_dir}` says what is wrong with it",
                ) from error
            if isinstance(event, LeaseGranted) and event.lease.pool == pool:
                leases[event.digest] = event.lease
            elif isinstance(event, SubmissionReceived) and event.lease in leases:
                if not is_digest(event.submission):
                    continue
                lease = leases[event.lease]
                files = submission_files(run_dir, lease.step, event.submission)
                if files.submission.is_file() and files.submission_envelope.is_file():
                    found.append(Taken(event.submission, lease, event.lease, files))
    return sorted(found, key=lambda taken: taken.lease.version)


def rollouts_of(taken: Taken, spec: RunSpec) -> Iterator[Rollout]:
    """The rollouts of a submission that one version sampled, which a prefill can reproduce.

    Raises:
        UserError: the files are not those of the lease: an honest run has none such.
    """
    pool = next(pool for pool in spec.samplers if pool.name == taken.lease.pool)
    try:
        rows = open_rows(
            read_bounded(taken.files.submission_envelope, MAX_ENVELOPE_BYTES),
            read_bounded(taken.files.submission, max_submission_bytes(spec, pool)),
            lease=taken.lease,
            lease_digest=taken.lease_digest,
            max_rows=max_submission_rows(spec, pool),
            max_bytes=max_submission_bytes(spec, pool),
        )
    except (OSError, Rejected) as error:
        raise dishonest(taken, error) from error
    for number, row in enumerate(rows):
        if not 0 < len(row.output_tokens) == len(row.logprobs):
            raise dishonest(taken, f"row {number} has no log-prob for each token")
        if row.is_of_its_version:
            yield row


def dishonest(taken: Taken, reason: object) -> UserError:
    """What no honest worker sends."""
    return UserError(
        f"not an honest submission: {reason}",
        place=str(taken.files.submission),
        remedy="name the directory of a run whose workers were all your own",
    )
