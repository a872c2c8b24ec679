"""`runspec pause`: asks a run's supervisor to stop its roles in order, and waits for that."""

from __future__ import annotations

import time
from pathlib import Path

from runspec.core.errors import UserError
from runspec.local.live import PAUSE, ask
from runspec.local.run_dir import find_run, holder
from runspec.local.snapshot import look_at

LET_GO_PATIENCE_S = 60.0
_POLL_S = 0.1


def pause_command(run: str, runs_dir: Path) -> int:
    """Pauses the run; returns 0 once nothing of it is alive, as when nothing was."""
    run_dir = find_run(run, runs_dir)
    if holder(run_dir) is None:
        print(f"{run_dir.name} is not alive: {look_at(run_dir, ledger=False).state}")
        return 0
    ask(run_dir, PAUSE, {}, say=lambda text: print(f"The supervisor {text}"))
    _await_release(run_dir)
    print(
        f"{run_dir.name} is paused. To go on from the newest checkpoint: runspec resume {run_dir}"
    )
    return 0


def _await_release(run_dir: Path) -> None:
    """Its roles have ended: now the supervisor writes the summary, and goes."""
    deadline = time.monotonic() + LET_GO_PATIENCE_S
    while (held_by := holder(run_dir)) is not None:
        if time.monotonic() >= deadline:
            raise UserError(
                f"every role has ended, but the run is still held by {held_by}",
                place=str(run_dir),
                remedy=f"see {run_dir / 'logs'}, or end that process",
            )
        time.sleep(_POLL_S)
