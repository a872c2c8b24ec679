"""`runspec resume`: goes on with a run by the spec in its directory."""

from __future__ import annotations

from pathlib import Path

from runspec.cli.apply import carry_out
from runspec.core.errors import UserError
from runspec.core.spec.resolved import load_resolved
from runspec.local.planning import make_plan
from runspec.local.run_dir import find_run, run_directory


def resume_command(run: str, detach: bool, runs_dir: Path) -> int:
    """Goes on from the newest checkpoint; returns the exit code, as `apply` does."""
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
