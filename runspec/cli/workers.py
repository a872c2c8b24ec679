"""`runspec workers`, `ban` and `unban`: whose work a run takes, and what it has earned."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from runspec.cli.desk import desk
from runspec.cli.view import plain_table

_SOURCES = {name: name for name in ("key", "pool", "standing", "reputation", "prefill_share")}
_SOURCES |= {"credits": "accepted_tokens", "accepted": "accepted_submissions"}
_SOURCES |= {"rejected": "rejected_submissions", "withheld": "withheld_leases"}
_SOURCES |= {"alive": "alive", "reason": "reason"}
"""What is told of a worker, and its name in the coordinator's status."""
_NEVER_REGISTERED: dict[str, Any] = {**dict.fromkeys(_SOURCES, 0), "pool": None, "alive": False}
_NEVER_REGISTERED |= {"standing": "banned", "reputation": 0.0, "prefill_share": 1.0}


def workers_command(run: str, as_json: bool, runs_dir: Path) -> int:
    """Lists the workers, those with the most credit first; returns the exit code."""
    rows = worker_rows(desk(run, runs_dir).status())
    if as_json:
        print(json.dumps(rows, indent=2))
    elif rows:
        Console(markup=False, highlight=False, soft_wrap=True).print(worker_table(rows))
        if any(row["standing"] == "banned" for row in rows):
            print(f"an appeal is granted with: runspec unban {run} KEY --reason WHY")
    else:
        print("no worker has registered")
    return 0


def worker_rows(status: dict[str, Any]) -> list[dict[str, Any]]:
    """What is told of each key.

    Args:
        status: answer of `GET /v1/status`.

    Returns:
        By credit: key, pool (null for a banned key that never registered), standing, reputation in
        [0, 1], prefill_share, credits (accepted output tokens), accepted, rejected, withheld,
        alive, reason.
    """
    rows = [
        {name: worker[source] for name, source in _SOURCES.items()} for worker in status["workers"]
    ]
    rows.sort(key=lambda row: (-row["credits"], row["key"]))
    registered = {row["key"] for row in rows}
    return rows + [
        {**_NEVER_REGISTERED, "key": key, "reason": reason}
        for key, reason in sorted(status["banned"].items())
        if key not in registered
    ]


def worker_table(rows: list[dict[str, Any]]) -> Table:
    """What `worker_rows` found, for people."""
    table = plain_table(
        *("key", "pool", "standing", "reputation", "recomputed", "credits"),
        *("accepted", "rejected", "withheld", "alive", "reason"),
    )
    for row in rows:
        table.add_row(
            *(row["key"][:16], row["pool"] or "", row["standing"]),
            *(f"{row['reputation']:.2f}", f"{row['prefill_share']:.0%}", f"{row['credits']:,}"),
            *(str(row[name]) for name in ("accepted", "rejected", "withheld")),
            *("yes" if row["alive"] else "no", _printable(row["reason"])),
        )
    return table


def _printable(text: str) -> str:
    """A reason may repeat what a stranger sent; terminals obey control characters."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def ban_command(run: str, key: str, reason: str, runs_dir: Path) -> int:
    """Bans a key; returns the exit code."""
    whole = _order("ban", run, key, reason, runs_dir)
    print(f"{whole} is banned: its requests are refused, and its open leases are over")
    return 0


def unban_command(run: str, key: str, reason: str, runs_dir: Path) -> int:
    """Lifts a ban; returns the exit code."""
    whole = _order("unban", run, key, reason, runs_dir)
    print(f"{whole} may work again; all its work is recomputed until enough was accepted")
    return 0


def _order(verb: str, run: str, key: str, reason: str, runs_dir: Path) -> str:
    """Gives an order about a key; returns the whole key."""
    coordinator = desk(run, runs_dir)
    whole = coordinator.find_key(key)
    coordinator.order(verb, whole, reason)
    return whole
