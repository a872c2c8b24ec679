"""Fake monitors: tools that write what they get, raise, or hang."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from runspec.local.monitors import Entry, Target
from tests.examples.installed import add_package

KINDS = ("writing", "raising", "hanging", "unimportable")


def install(directory: Path) -> str:
    """Writes what an installation of them leaves; returns what goes to PYTHONPATH."""
    lines = [f"{kind} = {__name__}:{kind.capitalize()}Monitor" for kind in KINDS]
    add_package(directory, "fake-monitors", "\n".join(["[runspec.monitors]", *lines]))
    return str(directory)


class WritingMonitor:
    """Writes a line for each entry."""

    def start(self, target: Target) -> None:
        target.folder.mkdir(parents=True, exist_ok=True)
        self._path = target.folder / f"{target.record}.entries"
        self._path.touch()

    def send(self, entry: Entry) -> None:
        row = {"number": entry.number, entry.axis: entry.at, "scalars": dict(entry.scalars)}
        with self._path.open("a") as file:
            file.write(json.dumps(row | {"rollouts": len(entry.rollouts)}) + "\n")

    def flush(self) -> None:
        pass

    close = flush


class RaisingMonitor(WritingMonitor):
    """Fails at step 3."""

    def send(self, entry: Entry) -> None:
        if entry.at == 3:
            raise ConnectionError("the tool's server is gone")
        super().send(entry)


class HangingMonitor(WritingMonitor):
    """Never returns from sending step 3."""

    def send(self, entry: Entry) -> None:
        if entry.at == 3:
            time.sleep(3600.0)
        super().send(entry)


def entries(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Return what writing monitors wrote, by record in the order of their beginning."""
    files = sorted(folder.glob("*.entries"), key=lambda path: path.stat().st_ctime_ns)
    return {f.stem: [json.loads(line) for line in f.read_text().splitlines()] for f in files}
