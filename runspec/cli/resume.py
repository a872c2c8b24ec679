"""`runspec resume`: goes on with a run by the spec in its directory."""

from __future__ import annotations

import sys
from pathlib import Path

from runspec.cli.apply import show_result
from runspec.cli.background import start_in_background
from runspec.cli.signals import EXIT_INTERRUPTED, StopSignals
from runspec.cli.view import watching
from runspec.core.errors import UserError
from runspec.core.spec.resolved import load_resolved
from runspec.local.apply import NotReady, is_finished, open_run, supervise
from runspec.local.run_dir import EXIT_LOCKED, RunLocked, find_run, run_directory

EXIT_FAILED = 1


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
    try:
        if is_finished(spec, run_dir.parent):
            print(f"{spec.name} is finished: all {spec.steps} steps are trained.")
            show_result(run_dir)
            return 0
        with open_run(spec, run_dir.parent) as opened:
            if detach:
                return start_in_background(opened)
            with StopSignals() as requests, watching(spec.name, spec.steps) as view:
                outcome = supervise(opened, view, requests)
    except NotReady as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_FAILED
    except RunLocked as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_LOCKED
    show_result(run_dir)
    if outcome.kind in ("interrupted", "paused"):
        print(f"{outcome.kind.capitalize()}. To go on: runspec resume {run_dir}")
    return EXIT_INTERRUPTED if outcome.kind == "interrupted" else 0
