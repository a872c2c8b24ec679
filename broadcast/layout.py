"""Paths of a store, on disk and below a server's URL, and the lock of its one writer."""

from __future__ import annotations

import re
from contextlib import AbstractContextManager
from pathlib import Path

from runspec.core import files
from runspec.core.errors import UserError

MAX_VERSION = 2**31
RUN = re.compile(r"[a-z0-9][a-z0-9_-]{0,62}")
"""Form of a run's id: the run spec's `name`."""


def is_run(text: object) -> bool:
    """Return whether `text` is a run's id, and so is safe as a folder name."""
    return isinstance(text, str) and RUN.fullmatch(text) is not None


def is_version(value: object) -> bool:
    return type(value) is int and 0 <= value < MAX_VERSION


def roles_name(run: str) -> str:
    return f"{run}/roles.json"


def latest_name(run: str) -> str:
    return f"{run}/latest.json"


def manifest_name(run: str, version: int) -> str:
    return f"{run}/versions/{version}/manifest.json"


def chunks_name(run: str) -> str:
    return f"{run}/chunks"


def chunk_name(run: str, digest: str) -> str:
    return f"{chunks_name(run)}/{digest}"


def stored_versions(store: Path, run: str) -> list[int]:
    """Return the versions whose manifest is in a store, in ascending order."""
    found = (path.parent.name for path in store.glob(f"{run}/versions/*/manifest.json"))
    return sorted(int(name) for name in found if name.isdecimal())


def locked(store: Path, run: str, deadline_s: float) -> AbstractContextManager[None]:
    """Hold the write lock of a run's part of a store: one publisher, or one relay.

    The lock excludes every other process; a killed process releases it.

    Args:
        store: the store's directory.
        run: the run's id.
        deadline_s: seconds to wait for another holder; the thread sleeps.

    Raises:
        UserError: another process still holds it.
    """
    folder = store / run
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = files.open_folder_lock(folder)
    held = UserError(
        f"another publisher or relay has held this store for {deadline_s:g} s",
        place=str(folder),
        remedy="let one process publish a run, and give each relay its own folder",
    )
    return files.locked(descriptor, deadline_s, held)
