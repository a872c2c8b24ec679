"""Submissions that are not accepted yet; a worker that must stop stores them on its disk.

The coordinator may refuse a submission for a while if too many wait for a verdict. A worker that
is stopped meanwhile writes its submissions to its folder, and sends the same bytes at its next
start if the lease is still valid. A worker that is killed stores nothing and samples again.

    <lease>.submission    a line with the signed envelope, which names the table's digest; the table
"""

from __future__ import annotations

import logging
import threading
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from runspec.core.errors import UserError
from runspec.core.files import read_bounded, remove_leftovers, write_atomic
from runspec.core.hashing import digest_bytes
from runspec.core.signed import BadSignature
from verify.formats.submission import MAX_ENVELOPE_BYTES, open_submission

_SUFFIX = ".submission"


@dataclass(frozen=True)
class Made:
    """A submission that is ready to send."""

    envelope: bytes
    table: bytes


class Outbox:
    """Submissions to send, by the digest of their lease. Thread-safe.

    Args:
        folder: stores the submissions of a worker that stops.
        run: the run's name.
        worker: the worker's public key.
        max_bytes: limit of a submission's table.
        log: receives warnings about lost or damaged submissions.
    """

    def __init__(
        self, folder: Path, *, run: str, worker: str, max_bytes: int, log: logging.Logger
    ) -> None:
        self._folder, self._run, self._worker = folder, run, worker
        self._max_bytes, self._log = max_bytes, log
        self._lock = threading.Lock()
        self._made: dict[str, Made] = {}

    def put(self, lease: str, made: Made) -> None:
        """Add a submission that is about to be sent."""
        with self._lock:
            self._made[lease] = made

    def settle(self, lease: str) -> None:
        """Remove a submission that was accepted or refused."""
        with self._lock:
            self._made.pop(lease, None)
            with suppress(OSError):  # at worst it is sent and refused once more
                (self._folder / f"{lease}{_SUFFIX}").unlink(missing_ok=True)

    def keep(self) -> list[str]:
        """Write the remaining submissions to disk, to be sent at the next start.

        Returns:
            The leases whose submissions are on the disk now.
        """
        with self._lock:
            return [lease for lease, made in self._made.items() if self._kept(lease, made)]

    def load(self) -> dict[str, Made]:
        """Return the submissions that an earlier process stored, by lease; remove damaged ones."""
        remove_leftovers(self._folder)
        for path in sorted(self._folder.glob(f"*{_SUFFIX}")):
            try:
                self.put(path.stem, self._read(path))
            except (OSError, UserError, BadSignature) as error:
                self._log.warning("%s is no submission to send: %s", path, error)
                self.settle(path.stem)
        with self._lock:
            return dict(self._made)

    def _kept(self, lease: str, made: Made) -> bool:
        try:
            data = made.envelope + b"\n" + made.table
            write_atomic(self._folder / f"{lease}{_SUFFIX}", data)
        except UserError as error:
            self._log.warning("a submission is lost, its lease can be sampled again: %s", error)
            return False
        return True

    def _read(self, path: Path) -> Made:
        data = read_bounded(path, MAX_ENVELOPE_BYTES + self._max_bytes)
        envelope, _, table = data.partition(b"\n")
        said = open_submission(envelope)
        if (said.run, said.worker, said.lease) != (self._run, self._worker, path.stem):
            raise BadSignature("submission: of another run, worker or lease")
        if len(table) > self._max_bytes or digest_bytes(table) != said.digest:
            raise BadSignature("submission: the table is not the one that was signed")
        return Made(envelope, table)
