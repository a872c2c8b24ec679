"""`runspec workers`: whose work a run takes, and what it has earned."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from runspec.cli.desk import desk
from runspec.cli.status import plain_table


def workers_command(run: str, as_json: bool, runs_dir: Path) -> int:
    """Lists the workers, those with the most credit first; returns the exit code."""
    coordinator = desk(run, runs_dir)
    rows = worker_rows(coordinator.status())
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
        {
            "key": worker["key"],
            "pool": worker["pool"],
            "standing": worker["standing"],
            "reputation": worker["reputation"],
            "prefill_share": worker["prefill_share"],
            "credits": worker["accepted_tokens"],
            "accepted": worker["accepted_submissions"],
            "rejected": worker["rejected_submissions"],
            "withheld": worker["withheld_leases"],
            "alive": worker["alive"],
            "reason": worker["reason"],
        }
        for worker in status["workers"]
    ]
    rows.sort(key=lambda row: (-row["credits"], row["key"]))
    registered = {row["key"] for row in rows}
    return rows + [
        _never_registered(key, reason)
        for key, reason in sorted(status["banned"].items())
        if key not in registered
    ]


def _never_registered(key: str, reason: str) -> dict[str, Any]:
    return {
        "key": key,
        "pool": None,
        "standing": "banned",
        "reputation": 0.0,
        "prefill_share": 1.0,
        "credits": 0,
        "accepted": 0,
        "rejected": 0,
        "withheld": 0,
        "alive": False,
        "reason": reason,
    }


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
