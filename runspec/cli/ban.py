"""`runspec ban` and `runspec unban`: who may not work for a run, and whose appeal was granted."""

from __future__ import annotations

from pathlib import Path

from runspec.cli.desk import desk


def ban_command(run: str, key: str, reason: str, runs_dir: Path) -> int:
    """Bans a key; returns the exit code."""
    coordinator = desk(run, runs_dir)
    whole = coordinator.find_key(key)
    coordinator.post("/v1/operator/ban", {"key": whole, "reason": reason})
    print(f"{whole} is banned: its requests are refused, and its open leases are over")
    return 0


def unban_command(run: str, key: str, reason: str, runs_dir: Path) -> int:
    """Lifts a ban; returns the exit code."""
    coordinator = desk(run, runs_dir)
    whole = coordinator.find_key(key)
    coordinator.post("/v1/operator/unban", {"key": whole, "reason": reason})
    print(f"{whole} may work again; all its work is recomputed until enough was accepted")
    return 0
