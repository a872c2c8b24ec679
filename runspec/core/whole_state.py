"""The files of a full state, compared with what was written: for the learner and commands alike."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from runspec.core.canonical import parse_object
from runspec.core.files import read_bounded
from runspec.core.hashing import digest_file
from runspec.core.object_store import Folder, ObjectPath, last_file

ARRAYS_NAME = "state"
RECORD_NAME = "state.json"
MAX_RECORD_BYTES = 64 * 1024 * 1024
_CHECKED_WHEN_READ = "crc32c"
"""Of each object of a store, whose chunks hold their own checksums: one read suffices."""


def record_of(state: Folder) -> dict[str, Any]:
    """Reads what was written last of a full state.

    Args:
        state: its folder, step_<N>.

    Raises:
        OSError, MalformedJson: it is missing or no JSON object.
    """
    path = last_file(state, RECORD_NAME)
    return parse_object(read_bounded(path, MAX_RECORD_BYTES), max_bytes=MAX_RECORD_BYTES)


def file_digests(state: Folder) -> dict[str, str]:
    """Returns the BLAKE3 digests of the arrays' files by name; reads all of them on a disk."""
    root = state / ARRAYS_NAME
    if isinstance(root, ObjectPath):
        return dict.fromkeys(sorted(root.names()), _CHECKED_WHEN_READ)
    paths = sorted(path for path in root.rglob("*") if path.is_file())
    return {path.relative_to(root).as_posix(): digest_file(path) for path in paths}


def damaged_file(state: Folder, files: Mapping[str, str]) -> str | None:
    """Returns the name of a file that is missing or not what was written; None for none."""
    found = file_digests(state)
    names = (name for name in sorted({*found, *files}) if found.get(name) != files.get(name))
    return next(names, None)
