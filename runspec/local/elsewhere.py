"""Runs whose directory is on another machine: a note in its place says who reaches it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from runspec.core.canonical import MalformedJson, canonical_json, parse_object
from runspec.core.errors import RunElsewhere, UserError
from runspec.core.files import read_bounded, write_atomic
from runspec.local.backend import backend

FILE_NAME = "site.json"
_MAX_BYTES = 64 * 1024


def note_site(run_dir: Path, site: Mapping[str, str]) -> None:
    """Notes how a run is reached.

    Args:
        run_dir: where the run would lie on this machine, by whose path it lies on the other.
        site: `backend`, `run`, and what the backend wants to know again.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    known = {"runs_dir": str(run_dir.parent), **site}
    write_atomic(run_dir / FILE_NAME, canonical_json(known))


def read_site(run_dir: Path) -> dict[str, str] | None:
    """What was noted; None where nothing was.

    Raises:
        UserError: it cannot be read.
    """
    path = run_dir / FILE_NAME
    try:
        site = parse_object(read_bounded(path, _MAX_BYTES), max_bytes=_MAX_BYTES)
        return {key: str(site[key]) for key in ("backend", "run", "runs_dir", *site)}
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, MalformedJson, KeyError) as error:
        raise UserError(
            f"cannot be read: {error}", place=str(path), remedy="remove it, then apply again"
        ) from error


def refuse_elsewhere(run_dir: Path, named: str) -> None:
    """Raises RunElsewhere for a run that was applied from here and lies on another machine.

    Args:
        run_dir: where the run would lie on this machine.
        named: as the command line names the run.
    """
    site = read_site(run_dir)
    if site is None:
        return

    def carry(arguments: Sequence[str]) -> int:
        there = [site["run"] if word == named else word for word in arguments]
        there += ["--runs-dir", site["runs_dir"]]  # of two the last one counts
        code = backend(site["backend"]).command(site, there)
        if code == 0 and arguments[0] == "delete":
            (run_dir / FILE_NAME).unlink(missing_ok=True)
            with suppress(OSError):
                run_dir.rmdir()
        return code

    raise RunElsewhere(site["run"], carry)
