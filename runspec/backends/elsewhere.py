"""Runs that a backend drives on other machines: what a caller's machine keeps of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from runspec.core.canonical import MalformedJson, canonical_json, parse_object
from runspec.core.errors import UserError
from runspec.core.files import read_bounded, write_atomic

FILE_NAME = "site.json"
MAX_BYTES = 64 * 1024


@dataclass(frozen=True)
class Elsewhere:
    """Where a run is."""

    backend: str
    options: Mapping[str, str]
    """What the backend needs to find it there."""


def note_elsewhere(run_dir: Path, where: Elsewhere) -> None:
    """Keeps in the run's folder on this machine where the run itself is."""
    run_dir.mkdir(parents=True, exist_ok=True)
    data = {"backend": where.backend, "options": dict(where.options)}
    write_atomic(run_dir / FILE_NAME, canonical_json(data))


def find_elsewhere(run: str, runs_dir: Path) -> tuple[Path, Elsewhere] | None:
    """The folder of a run given by name or path, and where it is; None for a run of this machine.

    Raises:
        UserError: the file that says so is damaged.
    """
    for folder in (runs_dir / run, Path(run)):
        path = folder / FILE_NAME
        if not path.is_file():
            continue
        try:
            read = parse_object(read_bounded(path, MAX_BYTES), max_bytes=MAX_BYTES)
            options = {str(name): str(value) for name, value in read["options"].items()}
            return folder, Elsewhere(str(read["backend"]), options)
        except (MalformedJson, KeyError, AttributeError) as error:
            raise UserError(
                f"does not say where the run is: {error}",
                place=str(path),
                remedy="apply the run again",
            ) from error
    return None
