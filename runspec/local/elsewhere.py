"""Runs whose directory is on another machine: a note in its place says who reaches it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path

from runspec.core.canonical import MalformedJson, canonical_json, parse_object
from runspec.core.errors import RunElsewhere, UserError
from runspec.core.files import read_bounded, write_atomic
from runspec.local.backend import backend

FILE_NAME = "site.json"
_MAX_BYTES = 64 * 1024


def note_site(run_dir: Path, site: Mapping[str, str]) -> None:
    """Notes how a run is reached: `backend`, `run`, and what the backend wants to know again."""
    run_dir.mkdir(parents=True, exist_ok=True)
    write_atomic(run_dir / FILE_NAME, canonical_json(dict(site)))


def read_site(run_dir: Path) -> dict[str, str] | None:
    """What was noted; None where nothing was.

    Raises:
        UserError: it cannot be read.
    """
    path = run_dir / FILE_NAME
    try:
        site = parse_object(read_bounded(path, _MAX_BYTES), max_bytes=_MAX_BYTES)
        return {key: str(site[key]) for key in ("backend", "run", *site)}
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, MalformedJson, KeyError) as error:
        raise UserError(
            f"cannot be read: {error}", place=str(path), remedy="remove it, then apply again"
        ) from error


def refuse_elsewhere(run_dir: Path) -> None:
    """Raises RunElsewhere for a run that was applied from here and lies on another machine."""
    site = read_site(run_dir)
    if site is not None:
        made = backend(site["backend"])
        raise RunElsewhere(site["run"], partial(made.command, site))
