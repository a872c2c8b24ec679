"""Failed attempts at submissions, kept beside the ledger: a file for each suspect.

They are no events: an attempt may count later or never, and what comes of it is the ledger's (a
verdict, or `SubmissionSetAside`). But a file that kills validators must not have three more with
each restart of the coordinator. Each change is one file, written whole or not at all.
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
"""Of the run directory."""
_SUFFIX = ".json"
_MAX_BYTES = 64 * 1024
_CODEC: TypeAdapter[tuple[Failure, ...]] = TypeAdapter(tuple[Failure, ...])
_log = logging.getLogger(__name__)


class AttemptFiles:
    """The memory of a run's claims.

    A disk that cannot be written costs what it would have kept, which is said, and nothing else.

    Args:
        run_dir: the run's.
    """

    def __init__(self, run_dir: Path) -> None:
        self._folder = run_dir / FOLDER

    def load(self) -> dict[str, tuple[Failure, ...]]:
        """What is kept, by submission; a damaged file is removed, and said."""
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
        """Replaces what is kept of a submission."""
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
