"""`runspec monitor`: sends a run's figures to a tool, as a role of the run or by hand."""

from __future__ import annotations

from pathlib import Path

from runspec.core.errors import UserError
from runspec.core.process import run_role, stop_event
from runspec.core.spec.resolved import load_resolved
from runspec.local.monitors.follow import follow
from runspec.local.run_dir import find_run


def monitor_command(run: str, name: str, runs_dir: Path) -> int:
    """Follows a run while it is alive, or sends what is there; returns the exit code of a role.

    Raises:
        UserError: there is no such run, or its spec has no such monitor.
    """
    run_dir = find_run(run, runs_dir)
    spec = load_resolved(run_dir)
    setting = next((each for each in spec.monitors if each.name == name), None)
    if setting is None:
        there = ", ".join(each.name for each in spec.monitors)
        raise UserError(
            f"no monitor {name!r}",
            place=f"monitors of {spec.name}",
            remedy=f"one of: {there}" if there else "add it to the spec, then apply again",
        )
    return run_role(
        f"monitor-{name}", lambda log: follow(run_dir, spec, setting, stop_event(), log)
    )
