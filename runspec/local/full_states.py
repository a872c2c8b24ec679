"""The full states of a run as files: which there are, how large, and whether one is whole."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runspec.core.canonical import MalformedJson, parse_object
from runspec.core.errors import UserError
from runspec.core.files import read_bounded
from runspec.core.hashing import digest_file
from runspec.core.spec.run_files import numbered, state_folder
from runspec.core.spec.schema import RunSpec

_RECORD, _ARRAYS = "state.json", "state"
_MAX_RECORD_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True)
class FullState:
    """checkpoints/state/step_<N>: the training state after N steps."""

    step: int
    path: Path

    @property
    def bytes(self) -> int:
        return folder_bytes(self.path)

    def require_whole(self) -> None:
        """Compares every file with the digests in state.json, as the learner will.

        Raises:
            UserError: one is missing or damaged.
        """
        place = str(self.path)
        try:
            record = parse_object(
                read_bounded(self.path / _RECORD, _MAX_RECORD_BYTES), max_bytes=_MAX_RECORD_BYTES
            )
        except (OSError, MalformedJson) as error:
            raise UserError(f"unreadable full state: {error}", place=place) from error
        files: Any = record.get("files")
        if not isinstance(files, Mapping):
            raise UserError("unreadable full state: no list of files", place=place)
        arrays = self.path / _ARRAYS
        found = {
            path.relative_to(arrays).as_posix(): path
            for path in sorted(arrays.rglob("*"))
            if path.is_file()
        }
        for name in sorted({*found, *files}):
            if name not in found or digest_file(found[name]) != files.get(name):
                raise UserError(f"{name} is missing or not what was written", place=place)


def full_states(run_dir: Path, spec: RunSpec) -> list[FullState]:
    """Those that lie there, in order."""
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
