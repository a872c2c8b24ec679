"""Full states as files: which a run has, how large they are, and whether one is whole."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runspec.core.canonical import MalformedJson
from runspec.core.errors import UserError
from runspec.core.object_store import Folder
from runspec.core.run_files import SENT_NAME, damaged_file, numbered, record_of, state_folder
from runspec.core.spec.schema import RunSpec


@dataclass(frozen=True)
class FullState:
    """checkpoints/state/step_<N>: the training state after N steps."""

    step: int
    path: Folder

    @property
    def bytes(self) -> int | None:
        """Bytes of all its files; None in an object store."""
        return folder_bytes(self.path) if isinstance(self.path, Path) else None

    def is_committed(self) -> bool:
        """Return whether it holds the version of its number.

        It does not where an island wrote it before the step's record came. An unreadable one counts
        as committed: `require_whole` says what is wrong.
        """
        try:
            beside = record_of(self.path).get("beside")
        except (OSError, MalformedJson):
            return True
        return not (isinstance(beside, Mapping) and SENT_NAME in beside)

    def require_whole(self) -> None:
        """Compares every file with the digests in state.json, as the learner will.

        Raises:
            UserError: one is missing or damaged.
        """
        place = str(self.path)
        try:
            files: Any = record_of(self.path).get("files")
        except (OSError, MalformedJson) as error:
            raise UserError(f"unreadable full state: {error}", place=place) from error
        if not isinstance(files, Mapping):
            raise UserError("unreadable full state: no list of files", place=place)
        if (name := damaged_file(self.path, files)) is not None:
            raise UserError(f"{name} is missing or not what was written", place=place)


def full_states(run_dir: Path, spec: RunSpec) -> list[FullState]:
    """Return the full states in the folder, in order."""
    folder = state_folder(run_dir, spec)
    return [FullState(step, folder / f"step_{step}") for step in numbered(folder, "step_")]


def folder_bytes(folder: Path) -> int:
    """Bytes of all files below a folder; links are not followed, and count nothing."""
    total = 0
    for path in folder.rglob("*"):
        try:
            if path.is_file() and not path.is_symlink():
                total += path.stat().st_size
        except FileNotFoundError:  # removed meanwhile
            continue
    return total
