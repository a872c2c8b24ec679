"""`runspec status`: how far a run is and what its roles do, for people and for programs."""

from __future__ import annotations

import json
import time
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from runspec.cli.view import step_line
from runspec.local.metrics import read_rows
from runspec.local.run_dir import find_run, holder
from runspec.local.state import RunState
from runspec.local.text import duration
from runspec.spec.resolved import load_resolved

EVENTS = 10


def status_command(run: str, as_json: bool, runs_dir: Path) -> int:
    """Prints the status; returns the exit code."""
    status = read_status(find_run(run, runs_dir))
    if as_json:
        print(json.dumps(status, indent=2))
    else:
        _show(status)
    return 0


def read_status(run_dir: Path) -> dict[str, Any]:
    """Everything known of a run, from its directory alone.

    Keys: name, directory, state, reason, held_by, step, steps, wall_s, newest (the last row of
    metrics.jsonl), roles (by name), events. A run whose supervisor died without a word is
    `interrupted`, and its roles are `waiting`.
    """
    spec, held_by = load_resolved(run_dir), holder(run_dir)
    with closing(RunState(run_dir)) as state:
        row, roles, events = state.run(), state.roles(), state.events(EVENTS)
        wall_s = state.wall_s()
    rows = read_rows(run_dir)
    said, reason = (row.state, row.reason) if row else ("starting", "")
    lost = held_by is None and said in ("starting", "running")
    return {
        "name": spec.name,
        "directory": str(run_dir),
        "state": "interrupted" if lost else said,
        "reason": "its supervisor is gone; apply it again to go on" if lost else reason,
        "held_by": held_by,
        "step": rows[-1]["step"] + 1 if rows else 0,
        "steps": spec.steps,
        "wall_s": round(wall_s, 3),
        "newest": rows[-1] if rows else None,
        "roles": {
            role.name: asdict(role) | ({"state": "waiting", "pid": None} if lost else {})
            for role in roles
        },
        "events": [asdict(event) for event in events],
    }


def _show(status: dict[str, Any]) -> None:
    console = Console()
    reason = f" ({status['reason']})" if status["reason"] else ""
    up = duration(status["wall_s"])
    print(f"{status['name']}: {status['state']}{reason}, up for {up}")
    if status["held_by"]:
        print(f"held by {status['held_by']}")
    if status["newest"]:
        print(step_line(status["newest"], status["steps"]))
    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in ("role", "state", "restarts", "process", "since"):
        table.add_column(column)
    for role in status["roles"].values():
        since = time.strftime("%H:%M:%S", time.localtime(role["since"]))
        process = str(role["pid"] or "")
        table.add_row(role["name"], role["state"], str(role["restarts"]), process, since)
    console.print(table)
    for event in status["events"]:
        at = time.strftime("%H:%M:%S", time.localtime(event["time"]))
        print(f"{at} {event['role']}: {event['text']}")
