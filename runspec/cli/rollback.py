"""`runspec rollback`: takes a stopped run back to a policy version."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import typer

from runspec.local.children import end_leftovers
from runspec.local.rollback import complete_rollback, roll_back
from runspec.local.run_dir import find_run, hold
from runspec.local.snapshot import Snapshot, look_at
from runspec.local.state import RunState


def rollback_command(run: str, to: int, yes: bool, runs_dir: Path) -> int:
    """Takes the run back; returns 0.

    Raises:
        RunLocked: the run is alive.
    """
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
            typer.confirm(_question(seen, to), abort=True)
        roll_back(run_dir, to)
    print(f"{run_dir.name} is back at version {to}. To go on: runspec resume {run_dir}")
    return 0


def _question(seen: Snapshot, to: int) -> str:
    steps = max(0, seen.trained - to)
    return (
        f"Take {seen.spec.name} back to version {to}, and remove the {steps} steps after it with "
        "their checkpoints, weights and rollouts, and all keys?"
    )
