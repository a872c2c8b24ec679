"""A run directory with rows, samples and evaluations, for monitors to read."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import threading
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from runspec.core.files import write_atomic
from runspec.core.run_files import monitor_folder
from runspec.core.schema.load import FILE_NAME, dump_resolved
from runspec.local.monitors.follow import follow
from runspec.local.run_dir import hold
from tests.runspec.local.fake_run import ZERO, small_spec, store
from tests.waiting import eventually, one_ended

STEPS = 25
OWN = ("position.json", "lock")
"""Files that are not the tool's."""
KEYS = 40
"""Figures of a row."""


class LoggedRun:
    """A run of `STEPS` steps, whose directory a test fills.

    Args:
        run_dir: the run directory.
        monitor: the monitor `m`, as YAML writes it, without its name.
    """

    def __init__(self, run_dir: Path, monitor: str) -> None:
        monitors = f"monitors=[{{name: m, deadline: 50m, {monitor}}}]"
        self.spec = small_spec(
            "small", STEPS, monitors, "evaluations=[{name: held-out, every: 10}]"
        )
        self.path, self.folder = run_dir, monitor_folder(run_dir, "m")
        write_atomic(run_dir / FILE_NAME, dump_resolved(self.spec))

    def train(self, steps: Iterable[int], *, attempt: int = 1) -> None:
        """Appends rows and samples; rows of another attempt differ."""
        self.append("metrics.jsonl", (row(step, attempt) for step in steps))
        self.append("samples.jsonl", (sample(step, i) for step in steps for i in range(2)))

    def append(self, name: str, rows: Iterable[dict[str, Any]]) -> None:
        with (self.path / name).open("a") as file:
            file.writelines(json.dumps(each) + "\n" for each in rows)

    def roll_back(self, to: int) -> None:
        for name in ("metrics.jsonl", "samples.jsonl"):
            lines = (self.path / name).read_text().splitlines(keepends=True)
            kept = "".join(line for line in lines if json.loads(line)["step"] < to)
            write_atomic(self.path / name, kept.encode())

    def evaluate(self, *versions: int) -> None:
        store(self.path, *(replace(ZERO, version=version) for version in versions))

    def follow(self) -> None:
        """Sends what is there: nobody holds the run, so it is over."""
        [setting], log = self.spec.monitors, logging.getLogger("monitor-m")
        follow(self.path, self.spec, setting, threading.Event(), log)

    def process(self) -> subprocess.Popen[bytes]:
        """The same in a process of its own."""
        command = [sys.executable, "-m", "runspec", "monitor", str(self.path), "m"]
        return subprocess.Popen(command, stderr=subprocess.PIPE)

    def end(self) -> None:
        """Lets a process send the rest."""
        process = self.process()
        told = process.communicate()[1].decode()
        assert process.returncode == 0, told

    def kill_at(self, entries: int) -> None:
        """Starts a process, and kills it once it has noted so many entries and sends more. The run
        is held meanwhile: however late the kill comes, the process has not ended by itself."""
        position = self.folder / "position.json"

        def sending() -> bool:
            noted = position.exists() and json.loads(position.read_bytes())["number"] >= entries
            return noted and any(path.name not in OWN for path in self.folder.iterdir())

        with hold(self.path):
            process = self.process()
            try:
                eventually(sending, f"{entries} entries", hopeless=lambda: one_ended([process]))
            finally:
                process.kill()
                process.communicate()
        eventually(lambda: not _is_open(self.folder), "the end of what the process had started")


def _is_open(folder: Path) -> bool:
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        with suppress(OSError):  # it was closed, or is another user's
            if str(link.readlink()).startswith(str(folder)):
                return True
    return False


def row(step: int, attempt: int = 1) -> dict[str, Any]:
    figures = {f"figure_{i}": attempt + step / (i + 1) for i in range(KEYS)}
    waits = {"coordinator": 0.5, "input": None}
    return {"step": step, "version": step + 1, "time": 1.7e9 + step, **figures, "waits": waits}


def sample(step: int, i: int) -> dict[str, Any]:
    texts = {"prompt": "# spell\n*cat*", "output": "tac<eos>", "problem_id": f"p{i}"}
    return {"step": step, "version": step, **texts, "target": 8, "length": 4, "reward": 0.5}
