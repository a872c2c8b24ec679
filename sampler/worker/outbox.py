"""Submissions that are made and not taken in yet: a worker that must go leaves them on its disk.

The coordinator may say that too much waits for a verdict, and when to come again. Who is told to
end meanwhile writes what it has into its folder, and sends the same bytes at its next start, if
the lease is still alive then. A worker that is killed leaves nothing: it samples the same again.

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
    """A submission, ready to be handed in."""

    envelope: bytes
    table: bytes


class Outbox:
    """What is still to be handed in, by the digest of its lease; threads may share it.

    Args:
        folder: keeps what a worker that ends has not handed in.
        run: the run's name.
        worker: the worker's public key.
        max_bytes: of a submission's table.
        log: told of what is kept, and of what is no submission of ours.
    """

    def __init__(
        self, folder: Path, *, run: str, worker: str, max_bytes: int, log: logging.Logger
    ) -> None:
        self._folder, self._run, self._worker = folder, run, worker
        self._max_bytes, self._log = max_bytes, log
        self._lock = threading.Lock()
        self._made: dict[str, Made] = {}

    def put(self, lease: str, made: Made) -> None:
        """It is made, and about to be handed in."""
        with self._lock:
            self._made[lease] = made

    def settle(self, lease: str) -> None:
        """It was taken in or refused: nobody needs it any more."""
        with self._lock:
            self._made.pop(lease, None)
            with suppress(OSError):  # it is refused once more, at worst
                (self._folder / f"{lease}{_SUFFIX}").unlink(missing_ok=True)

    def keep(self) -> list[str]:
        """Writes what is still there, to be sent at the next start.

        Returns:
            The leases of what is on the disk now.
        """
        with self._lock:
            return [lease for lease, made in self._made.items() if self._kept(lease, made)]

    def load(self) -> dict[str, Made]:
        """What a process before this one has kept, by lease; what is damaged is removed."""
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
