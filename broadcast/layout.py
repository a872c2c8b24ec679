"""Where everything lies: in a store on disk, and by the same path below a server's URL."""

from __future__ import annotations

import re
from pathlib import Path

MAX_VERSION = 2**31
RUN = re.compile(r"[a-z0-9][a-z0-9_-]{0,62}")
"""Form of a run's id: the run spec's `name`."""


def is_run(text: object) -> bool:
    """Whether `text` is a run's id (and so is safe as a folder name)."""
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
    """Versions whose manifest lies in a store, in ascending order."""
    found = (path.parent.name for path in store.glob(f"{run}/versions/*/manifest.json"))
    return sorted(int(name) for name in found if name.isdecimal())
