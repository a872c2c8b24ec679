"""`runspec wait`: until a condition of a run holds, or cannot hold any more."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from runspec.local.awaiting import holds, hopeless, last_seen, parse_awaited
from runspec.local.conditions import condition, conditions
from runspec.local.run_dir import find_run
from runspec.local.snapshot import look_at

EXIT_HOLDS, EXIT_NOT = 0, 1
POLL_S = 0.25


def wait_command(run: str, awaited: str, timeout_s: float, runs_dir: Path) -> int:
    """Waits; returns 0 when it holds, 1 when it cannot or has not in time.

    Raises:
        UserError: there is no such run or condition.
    """
    wanted = parse_awaited(awaited)
    run_dir = find_run(run, runs_dir)
    deadline = time.monotonic() + timeout_s
    while True:
        seen = look_at(run_dir, ledger=wanted.type == "SetAside")
        if holds(wanted, seen):
            why = condition(conditions(seen), wanted.type).message if wanted.type else ""
            print(f"{seen.spec.name}: {wanted}{f' ({why})' if why else ''}")
            return EXIT_HOLDS
        reason = hopeless(wanted, seen)
        if reason is None and time.monotonic() >= deadline:
            reason = f"not within {timeout_s:g} s"
        if reason is not None:
            print(f"error: waited for {wanted}: {reason}", file=sys.stderr)
            print(f"  last seen: {last_seen(seen)}", file=sys.stderr)
            return EXIT_NOT
        time.sleep(POLL_S)
