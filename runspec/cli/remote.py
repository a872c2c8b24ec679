"""Commands on runs that a backend drives on other machines, from the machine that applied them."""

from __future__ import annotations

import shutil
from pathlib import Path

import typer

from runspec.backends.elsewhere import Elsewhere, find_elsewhere, note_elsewhere
from runspec.backends.kubernetes.remote import RemoteRun
from runspec.cli.render_backend import render_kubernetes, site_folder
from runspec.core.errors import UserError
from runspec.core.spec.resolved import load_resolved
from runspec.core.spec.schema import RunSpec
from runspec.local.run_dir import run_directory


def apply_elsewhere(spec: RunSpec, runs_dir: Path | None) -> int:
    """Starts or changes a run on the cluster that its spec describes; returns 0.

    Raises:
        UserError: the spec cannot run there, or the cluster refuses.
    """
    folder = run_directory(spec, runs_dir)
    objects = render_kubernetes(spec, site_folder(spec, runs_dir))
    RemoteRun(spec).apply(objects)
    note_elsewhere(folder, Elsewhere("kubernetes", {}))
    print(f"{spec.name} is on the cluster. See how far it is: runspec status {folder}")
    return 0


def remote_run(run: str, runs_dir: Path) -> RemoteRun | None:
    """A run that is elsewhere, by its name or folder; None for a run of this machine.

    Raises:
        UserError: this machine does not know its backend.
    """
    found = find_elsewhere(run, runs_dir)
    if found is None:
        return None
    folder, where = found
    if where.backend != "kubernetes":
        raise UserError(
            f"the run is on {where.backend}, which this installation does not know",
            place=str(folder),
            remedy="use the installation that applied it",
        )
    return RemoteRun(load_resolved(folder / "site"))


def delete_remote(remote: RemoteRun, run: str, yes: bool, runs_dir: Path) -> int:
    """Deletes a run on its cluster, and what this machine keeps of it; returns 0."""
    found = find_elsewhere(run, runs_dir)
    assert found is not None, "`remote_run` found it"
    folder, _ = found
    if not yes:
        typer.confirm(f"Delete {folder.name} on its cluster with everything in it?", abort=True)
    remote.delete()
    shutil.rmtree(folder)
    print(f"Deleted {folder.name} on its cluster, and removed {folder}")
    return 0
