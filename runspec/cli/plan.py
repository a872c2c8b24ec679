"""`runspec plan`: what would change, what it needs and how long a step takes, before it is so."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from runspec.common.errors import UserError
from runspec.lint.check import check_spec
from runspec.local.live import readers_names
from runspec.local.planning import RunPlan, make_plan
from runspec.local.run_dir import run_directory
from runspec.plan.changes import LIVE, Change, of_class, severest
from runspec.plan.rolling import renewed
from runspec.plan.saved import SavedPlan, save_plan
from runspec.spec.fields import CHANGE_CLASSES
from runspec.spec.findings import format_finding
from runspec.spec.load import SpecFiles
from runspec.spec.resolved import spec_digest

EXIT_FAILED, EXIT_UNREADABLE, EXIT_CHANGES = 1, 2, 6
_MARKS = {"add": ("+", "green"), "change": ("~", "yellow"), "remove": ("-", "red")}


def plan_command(
    files: SpecFiles, out: Path | None, as_json: bool, exit_code: bool, aot: bool, runs_dir: Path
) -> int:
    """Prints the plan, and saves it where asked; returns the exit code."""
    try:
        checked = check_spec(files)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_UNREADABLE
    spec = checked.require()
    for warning in checked.findings:
        print(format_finding(warning), file=sys.stderr)
    plan = make_plan(spec, run_directory(spec, runs_dir))
    report = plan_json(plan)
    if as_json:
        print(json.dumps(report, indent=2))
    else:
        show_plan(plan, Console(highlight=False))
    if out is not None:
        _save(out, plan, quiet=as_json)
    return EXIT_CHANGES if exit_code and plan.changes else 0


def plan_json(plan: RunPlan) -> dict[str, Any]:
    """The plan for programs; keys are only ever added.

    `change_class` is that of the severest change, `new` for a run that is not there yet, null where
    nothing changes.
    """
    return {
        "version": plan.spec.version,
        "run": plan.spec.name,
        "spec_digest": spec_digest(plan.spec),
        "serial": plan.seen.serial,
        "change_class": "new" if plan.new else severest(plan.changes),
        "changes": [asdict(change) for change in plan.changes],
        "lacking": [asdict(item) for item in plan.lacking],
    }


def show_plan(plan: RunPlan, console: Console) -> None:
    """The plan for people."""
    console.print(Text(_headline(plan), style="bold"), soft_wrap=True)
    if not plan.new:
        for change_class, meaning in CHANGE_CLASSES.items():
            if changes := of_class(plan.changes, change_class):
                console.print()
                console.print(Text(f"{change_class}: {_effect(plan, changes, meaning)}"))
                for change in changes:
                    console.print(_line(change), soft_wrap=True)
    if plan.lacking:
        console.print("\nThis machine lacks:")
        for item in plan.lacking:
            remedy = f" ({item.remedy})" if item.remedy else ""
            console.print(f"  {item.path}: {item.thing}{remedy}", markup=False, soft_wrap=True)


def _headline(plan: RunPlan) -> str:
    name, count = plan.spec.name, len(plan.changes)
    if plan.new:
        return f"{name} is new: {plan.spec.steps} steps, to lie in {plan.run_dir}"
    at = f"the run at serial {plan.seen.serial}, which is {plan.state}"
    if not count:
        return f"{name}: no changes against {at}"
    return f"{name}: {count} change{'s' if count > 1 else ''} against {at}"


def _effect(plan: RunPlan, changes: Sequence[Change], meaning: str) -> str:
    """What applying changes of one class does to the run as it is now."""
    change_class = changes[0].change_class
    if change_class == "newrun":
        return f"{meaning}; apply refuses them"
    if plan.held_by is None:
        return "taken over when the run goes on"
    if change_class not in LIVE:
        return f"{meaning}; apply refuses them until `runspec pause {plan.run_dir}`"
    turns = ", ".join(readers_names(renewed(changes), plan.spec))
    return f"{meaning}: {turns}" if turns else meaning


def _line(change: Change) -> Text:
    mark, style = _MARKS[change.kind]
    reason = f" ({change.reason})" if change.reason else ""
    return Text(f"  {mark} {change.path}: {_values(change)}{reason}", style=style)


def _values(change: Change) -> str:
    before, after = json.dumps(change.before), json.dumps(change.after)
    return {"add": after, "remove": before, "change": f"{before} -> {after}"}[change.kind]


def _save(path: Path, plan: RunPlan, *, quiet: bool) -> None:
    if not plan.new and of_class(plan.changes, "newrun"):
        raise UserError(
            "apply would refuse these changes: the plan is not saved",
            place=str(path),
            remedy="plan a run of another name with --set name=NAME",
        )
    save_plan(path, SavedPlan(plan.spec, plan.seen, round(time.time(), 3)))
    if not quiet:
        print(f"\nSaved. To apply exactly this: runspec apply {path}")
