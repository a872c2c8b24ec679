"""`runspec delete`: removes a run's directory."""

from __future__ import annotations

import shutil
import sys
from contextlib import closing
from pathlib import Path

import typer

from runspec.local.children import end_leftovers
from runspec.local.run_dir import EXIT_LOCKED, RunLocked, find_run, hold
from runspec.local.state import RunState
from runspec.spec.resolved import load_resolved
from runspec.spec.run_files import state_folder

LEFTOVER_PATIENCE_S = 10.0


def delete_command(run: str, yes: bool, runs_dir: Path) -> int:
    """Removes the directory unless the run is alive; returns the exit code."""
    run_dir = find_run(run, runs_dir)
    try:
        with hold(run_dir):
            kept = _kept(run_dir)
            if not yes:
                typer.confirm(f"Remove {run_dir} with everything in it?", abort=True)
            with closing(RunState(run_dir)) as state:
                end_leftovers(state.roles(), LEFTOVER_PATIENCE_S)
            # Renamed first: a removal cut short leaves nothing that looks like a run.
            doomed = run_dir.with_name(f".tmp-deleted-{run_dir.name}")
            shutil.rmtree(doomed, ignore_errors=True)
            run_dir.rename(doomed)
            shutil.rmtree(doomed)
    except RunLocked as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_LOCKED
    print(f"Removed {run_dir}")
    if kept is not None:
        print(f"Its full states stay in {kept}: a new run of this name needs them gone")
    return 0


def _kept(run_dir: Path) -> Path | None:
    """What of the run lies elsewhere, by its spec: that is not ours to remove."""
    spec = load_resolved(run_dir)
    folder = state_folder(run_dir, spec)
    return folder if spec.checkpoints.dir is not None and folder.exists() else None
