"""`runspec pause`, `resume`, `export`, `rollback` and `delete`."""

from __future__ import annotations

import shutil
import sys
import time
from contextlib import closing
from pathlib import Path

import typer

from runspec.core.errors import BadUsage, UserError
from runspec.core.files import Folder
from runspec.core.run_files import checkpoints_folder
from runspec.core.schema.load import load_resolved
from runspec.local.backend import end_leftovers
from runspec.local.formatting import reported
from runspec.local.model_folders import export_version
from runspec.local.planning import make_plan
from runspec.local.run_dir import find_run, hold, holder, run_directory
from runspec.local.run_view import look_at
from runspec.local.state import RunState
from runspec.local.supervisor import PAUSE, send_request

RELEASE_TIMEOUT_S = 60.0
_POLL_S = 0.1


def pause_command(run: str, runs_dir: Path) -> int:
    """Pause the run; return 0 once no process of it is alive, also where none was."""
    run_dir = find_run(run, runs_dir)
    if holder(run_dir) is None:
        print(f"{run_dir.name} is not alive: {look_at(run_dir, ledger=False).state}")
        return 0
    send_request(run_dir, PAUSE, {}, say=lambda text: print(f"The supervisor {text}"))
    # The supervisor, whose roles have ended, writes the summary.
    deadline = time.monotonic() + RELEASE_TIMEOUT_S
    while (held_by := holder(run_dir)) is not None:
        if time.monotonic() >= deadline:
            raise UserError(
                f"every role has ended, but the run is still held by {held_by}",
                place=str(run_dir),
                remedy=f"see {run_dir / 'logs'}, or end that process",
            )
        time.sleep(_POLL_S)
    print(
        f"{run_dir.name} is paused. To go on from the newest checkpoint: runspec resume {run_dir}"
    )
    return 0


def export_command(run: str, directory: Path, runs_dir: Path) -> int:
    """Export a version of the run that `run` names as NAME or NAME@VERSION; return 0."""
    name, version = run_and_version(run)
    run_dir = find_run(name, runs_dir)
    spec = load_resolved(run_dir)
    exported = export_version(run_dir, spec, version, directory)
    print(
        f"version {exported} of {spec.name} is in {directory}; its README.md says how to check it"
    )
    return 0


def run_and_version(text: str) -> tuple[str, int | None]:
    """Return name and version of NAME or NAME@VERSION; None is the newest.

    Raises:
        BadUsage: the version is no number.
    """
    name, at, version = text.partition("@")
    if at and not version.isdecimal():
        raise BadUsage(f"no version: {version!r}", place=text, remedy="name one as NAME@12")
    return name, int(version) if at else None


def resume_command(run: str, detach: bool, runs_dir: Path) -> int:
    """Goes on from the newest checkpoint; returns the exit code, as `apply` does."""
    from runspec.cli.apply import carry_out  # the other commands start faster without it

    run_dir = find_run(run, runs_dir)
    spec = load_resolved(run_dir)
    home = run_directory(spec, run_dir.parent)
    if home.resolve() != run_dir.resolve():
        raise UserError(
            f"by its spec this run is called {spec.name}",
            place=str(run_dir),
            remedy=f"rename the directory to {home}",
        )
    return carry_out(make_plan(spec, run_dir), detach=detach)


def rollback_command(run: str, to: int, yes: bool, runs_dir: Path) -> int:
    """Takes the run back; returns 0.

    Raises:
        RunLocked: the run is alive.
    """
    from runspec.local.rollback import complete_rollback, roll_back  # they import numpy

    run_dir = find_run(run, runs_dir)
    with hold(run_dir):
        with closing(RunState(run_dir)) as state:
            end_leftovers(state.roles())
        unfinished = complete_rollback(run_dir)
        if unfinished is not None:
            print(f"Completed a rollback to version {unfinished} that was cut short")
        seen = look_at(run_dir, ledger=False)
        if seen.trained == to:
            print(f"{seen.spec.name} is at version {to}: there is nothing after it")
            return 0
        if not yes:
            steps = max(0, seen.trained - to)
            question = (
                f"Take {seen.spec.name} back to version {to}, and remove the {steps} steps after "
                "it with their checkpoints, weights and rollouts, and all keys?"
            )
            typer.confirm(question, abort=True)
        roll_back(run_dir, to)
    print(f"{run_dir.name} is back at version {to}. To go on: runspec resume {run_dir}")
    return 0


def delete_command(run: str, yes: bool, runs_dir: Path) -> int:
    """Removes the directory; returns 0.

    Raises:
        RunLocked: the run is alive.
    """
    run_dir = find_run(run, runs_dir)
    with hold(run_dir):
        kept: Folder | None = None
        try:
            spec = load_resolved(run_dir)
            if spec.checkpoints.dir is not None:
                kept = checkpoints_folder(run_dir, spec)
        except UserError as error:
            print(f"warning: full states outside the run are not known: {error}", file=sys.stderr)
        if not yes:
            typer.confirm(f"Remove {run_dir} with everything in it?", abort=True)
        try:
            with closing(RunState(run_dir)) as state:
                end_leftovers(state.roles())
        except UserError as error:  # damaged: that must not keep it from being removed
            print(f"warning: roles that may still be alive are not known: {error}", file=sys.stderr)
        _remove(run_dir)
    print(f"Removed {run_dir}")
    if kept is not None and not (isinstance(kept, Path) and not kept.exists()):
        print(f"Its full states stay in {kept}: a new run of this name needs them gone")
    return 0


def _remove(run_dir: Path) -> None:
    # Renamed first: a removal cut short leaves nothing that looks like a run.
    doomed = run_dir.with_name(f".tmp-deleted-{run_dir.name}")
    remedy = f"mend the permissions, then remove {run_dir} and {doomed}"
    with reported("cannot be removed", run_dir, remedy, OSError):
        if doomed.exists():
            shutil.rmtree(doomed)
        run_dir.rename(doomed)
        shutil.rmtree(doomed)
