"""Failed attempts to judge submissions, stored beside the ledger: one file for each suspect.

They are no events, because an attempt may count later or never; its result is an event (a verdict,
or `SubmissionSetAside`). They outlive a restart, so that a file that kills validators does not get
three more of them each time. A change writes one file, as a whole.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from runspec.core.errors import UserError
from runspec.core.files import read_bounded, remove_leftovers, write_atomic
from runspec.core.hashing import is_digest
from verify.coordinator.claims import Failure

FOLDER = "attempts"
"""Folder in the run directory."""
_SUFFIX = ".json"
_MAX_BYTES = 64 * 1024
_CODEC: TypeAdapter[tuple[Failure, ...]] = TypeAdapter(tuple[Failure, ...])
_log = logging.getLogger(__name__)


class AttemptFiles:
    """Stores the failed attempts of a run.

    If the disk is full, the change is lost and a warning is logged; the coordinator keeps running.

    Args:
        run_dir: the run's.
    """

    def __init__(self, run_dir: Path) -> None:
        self._folder = run_dir / FOLDER

    def load(self) -> dict[str, tuple[Failure, ...]]:
        """Return the stored attempts by submission. A damaged file is removed, with a warning."""
        remove_leftovers(self._folder)
        found = {}
        for path in sorted(self._folder.glob(f"*{_SUFFIX}")):
            if not is_digest(path.stem):
                continue
            try:
                found[path.stem] = _CODEC.validate_json(read_bounded(path, _MAX_BYTES))
            except (OSError, UserError, ValidationError) as error:
                _log.warning("attempts at %s are forgotten: %s", path.stem[:16], error)
                self.forget(path.stem)
        return found

    def keep(self, submission: str, failures: Sequence[Failure]) -> None:
        """Replaces the stored attempts of a submission."""
        try:
            write_atomic(self._path(submission), _CODEC.dump_json(tuple(failures)))
        except (OSError, UserError) as error:
            words = "attempts at %s would be forgotten by a restart: %s"
            _log.warning(words, submission[:16], error)

    def forget(self, submission: str) -> None:
        try:
            self._path(submission).unlink(missing_ok=True)
        except OSError as error:
            _log.warning("attempts at %s cannot be removed: %s", submission[:16], error)

    def _path(self, submission: str) -> Path:
        return self._folder / f"{submission}{_SUFFIX}"
