"""`runspec delete`: removes a run's directory."""

from __future__ import annotations

import shutil
import sys
from contextlib import closing
from pathlib import Path

import typer

from runspec.core.errors import UserError
from runspec.core.object_store import Folder
from runspec.core.run_files import checkpoints_folder
from runspec.core.spec.resolved import load_resolved
from runspec.local.children import end_leftovers
from runspec.local.run_dir import find_run, hold
from runspec.local.state import RunState


def delete_command(run: str, yes: bool, runs_dir: Path) -> int:
    """Removes the directory; returns 0.

    Raises:
        RunLocked: the run is alive.
    """
    run_dir = find_run(run, runs_dir)
    with hold(run_dir):
        kept = _kept(run_dir)
        if not yes:
            typer.confirm(f"Remove {run_dir} with everything in it?", abort=True)
        _end_leftovers(run_dir)
        _remove(run_dir)
    print(f"Removed {run_dir}")
    if kept is not None:
        print(f"Its full states stay in {kept}: a new run of this name needs them gone")
    return 0


def _end_leftovers(run_dir: Path) -> None:
    try:
        with closing(RunState(run_dir)) as state:
            end_leftovers(state.roles())
    except UserError as error:  # damaged: that must not keep it from being removed
        print(f"warning: roles that may still be alive are not known: {error}", file=sys.stderr)


def _remove(run_dir: Path) -> None:
    # Renamed first: a removal cut short leaves nothing that looks like a run.
    doomed = run_dir.with_name(f".tmp-deleted-{run_dir.name}")
    try:
        if doomed.exists():
            shutil.rmtree(doomed)
        run_dir.rename(doomed)
        shutil.rmtree(doomed)
    except OSError as error:
        raise UserError(
            f"cannot be removed: {error}",
            place=str(run_dir),
            remedy=f"mend the permissions, then remove {doomed if doomed.exists() else run_dir}",
        ) from error


def _kept(run_dir: Path) -> Folder | None:
    """Returns where the run's checkpoints lie outside it, by its spec: they are not removed."""
    try:
        spec = load_resolved(run_dir)
    except UserError as error:
        print(f"warning: full states outside the run are not known: {error}", file=sys.stderr)
        return None
    folder = checkpoints_folder(run_dir, spec)
    if spec.checkpoints.dir is None or (isinstance(folder, Path) and not folder.exists()):
        return None
    return folder
