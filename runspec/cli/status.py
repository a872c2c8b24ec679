"""`runspec status`: how far a run is and what its roles do, for people and for programs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from runspec.cli.events import event_line
from runspec.cli.view import clock, latency_line, plain_table, role_table, step_line
from runspec.core.spec.schema import RunSpec
from runspec.local.conditions import Condition, conditions
from runspec.local.link import run_link
from runspec.local.run_dir import find_run
from runspec.local.snapshot import Snapshot, look_at
from runspec.local.text import duration


def status_command(run: str, as_json: bool, runs_dir: Path) -> int:
    """Prints the status; returns the exit code."""
    run_dir = find_run(run, runs_dir)
    if as_json:
        print(json.dumps(read_status(run_dir), indent=2))
    else:
        _show(look_at(run_dir))
    return 0


def read_status(run_dir: Path) -> dict[str, Any]:
    """What is known of a run, from its directory alone.

    Keys: name, directory, state, reason, held_by, step, steps, wall_s, newest (the last row of
    metrics.jsonl), published (the newest version that is out), join (the link that volunteers
    are sent), conditions, roles (by name), events.
    A run whose supervisor died without a word is `interrupted`. A role whose process went with its
    supervisor is `ended`. A role's `stage` is
    what it is at that takes long, like `loading vLLM`, or null.
    """
    seen = look_at(run_dir)
    return {
        "name": seen.spec.name,
        "directory": str(run_dir),
        "state": seen.state,
        "reason": seen.reason,
        "held_by": seen.held_by,
        "step": seen.trained,
        "steps": seen.spec.steps,
        "wall_s": round(seen.wall_s, 3),
        "newest": seen.rows[-1] if seen.rows else None,
        "published": seen.published,
        "join": str(link) if (link := run_link(run_dir, seen.spec)) else None,
        "conditions": [asdict(each) for each in conditions(seen)],
        "roles": {
            role.name: {**asdict(role), "stage": seen.stages.get(role.name)} for role in seen.roles
        },
        "events": [asdict(event) for event in seen.events],
    }


def _show(seen: Snapshot) -> None:
    console = Console(markup=False, highlight=False)
    print(headline(seen))
    if seen.held_by:
        print(f"held by {seen.held_by}")
        show_link(seen.directory, seen.spec)
    if seen.rows:
        print(step_line(seen.rows[-1], seen.spec.steps))
        if waited := latency_line(seen.rows[-1]):
            print(waited)
    console.print(condition_table([each for each in conditions(seen) if each.status != "False"]))
    console.print(role_table(seen.roles, seen.stages))
    for event in seen.events:
        print(event_line(event))


def show_link(run_dir: Path, spec: RunSpec) -> None:
    """How others join a run whose keys are made."""
    if link := run_link(run_dir, spec):
        if all(pool.trust == "trusted" for pool in spec.samplers):
            print(f"invite others with: runspec invite {run_dir} --pool POOL (all are trusted)")
        elif spec.verify.admission == "invite":
            print(f"invite others with: runspec invite {run_dir}")
        else:
            print(f"join with: runspec join '{link}' --key FILE")


def headline(seen: Snapshot) -> str:
    """A run's name, its state and why, and how long it was up."""
    reason = f" ({seen.cause})" if seen.cause else ""
    return f"{seen.spec.name}: {seen.state}{reason}, up for {duration(seen.wall_s)}"


def condition_table(shown: Sequence[Condition]) -> Table:
    table = plain_table("condition", "status", "reason", "since", "message")
    for each in shown:
        table.add_row(each.type, each.status, each.reason, clock(each.since), each.message)
    return table
