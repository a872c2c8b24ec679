"""`runspec apply`: from a spec to a finished run, or to one screen on why not."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from runspec.cli.background import start_in_background
from runspec.cli.signals import EXIT_INTERRUPTED, StopSignals
from runspec.cli.view import watching
from runspec.common.errors import UserError
from runspec.lint.check import check_spec
from runspec.local.apply import NotReady, is_finished, open_run, supervise
from runspec.local.conclude import REPORT_FILE, SUMMARY_FILE
from runspec.local.run_dir import EXIT_LOCKED, RunLocked
from runspec.local.text import duration, number
from runspec.spec.findings import format_finding
from runspec.spec.load import SpecFiles

EXIT_FAILED = 1
EXIT_UNREADABLE = 2
LAPTOP = "laptop"


def apply_command(files: SpecFiles, detach: bool, runs_dir: Path) -> int:
    """Starts or continues the run; returns the exit code."""
    try:
        loaded = check_spec(files)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_UNREADABLE
    spec = loaded.require()
    for warning in loaded.findings:
        print(format_finding(warning), file=sys.stderr)
    run_dir = runs_dir / spec.name
    again = _command_line(files, runs_dir)
    try:
        if is_finished(spec, runs_dir):
            print(f"{spec.name} is finished: all {spec.steps} steps are trained.")
            show_result(run_dir)
            return 0
        with open_run(spec, runs_dir) as run:
            if detach:
                return start_in_background(run)
            with StopSignals() as requests, watching(spec.name, spec.steps) as view:
                outcome = supervise(run, view, requests)
    except NotReady as error:
        _show_missing(error, files)
        return EXIT_FAILED
    except RunLocked as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_LOCKED
    show_result(run_dir)
    if outcome.kind == "interrupted":
        print(f"Interrupted by {requests.last}. To go on from the newest checkpoint: {again}")
        return EXIT_INTERRUPTED
    return 0


def show_result(run_dir: Path) -> None:
    """The first and last figures of a run, and where to look further."""
    path = run_dir / SUMMARY_FILE
    if not path.exists():
        print(f"No step has been trained yet; logs are in {run_dir / 'logs'}")
        return
    summary: dict[str, Any] = json.loads(path.read_bytes())
    table = Table(title=f"{summary['steps']} steps in {duration(summary['wall_s'])}")
    table.add_column("mean of ten steps")
    table.add_column("first", justify="right")
    table.add_column("last", justify="right")
    for label, key in (
        ("task reward", "task_reward"),
        ("length error, tokens", "length_error"),
        ("reward", "reward"),
    ):
        table.add_row(label, number(summary[f"{key}_first"]), number(summary[f"{key}_last"]))
    Console().print(table)
    print(f"Plots and rollouts: {run_dir / REPORT_FILE}   logs: {run_dir / 'logs'}")


def _show_missing(error: NotReady, files: SpecFiles) -> None:
    console = Console(stderr=True)
    console.print(Text(f"{error.name} cannot start on this machine. Missing:", style="bold"))
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column()
    for item in error.lacking:
        remedy = f"\n{item.remedy}" if item.remedy else ""
        table.add_row(Text(item.path, style="cyan"), Text(item.thing) + Text(remedy, style="dim"))
    console.print(table)
    laptop = files.path.parent / "profiles" / f"{LAPTOP}.yaml"
    if files.profile is None and laptop.exists():
        command = shlex.join(["runspec", "apply", str(files.path), "--profile", LAPTOP])
        console.print(f"The same loop, small enough for this machine: {command}", soft_wrap=True)


def _command_line(files: SpecFiles, runs_dir: Path) -> str:
    words = ["runspec", "apply", str(files.path)]
    words += ["--profile", files.profile] if files.profile else []
    words += ["--placement", str(files.placement)] if files.placement else []
    words += [word for override in files.overrides for word in ("--set", override)]
    words += ["--runs-dir", str(runs_dir)] if runs_dir != Path("runs") else []
    return shlex.join(words)
