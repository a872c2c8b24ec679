"""A run directory with rows, samples and evaluations, for monitors to read."""

from __future__ import annotations

import json
import logging
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from runspec.core.files import write_atomic
from runspec.core.run_files import monitor_folder
from runspec.core.spec.resolved import FILE_NAME, dump_resolved, load_resolved
from runspec.local.monitors.follow import follow
from tests.runspec.local.fake_run import small_spec
from tests.runspec.local.test_evaluations import ZERO, store
from tests.waiting import eventually

STEPS = 25
DEADLINE_S = 240.0
KEYS = 40
"""Figures of a row."""


class LoggedRun:
    """A run of `STEPS` steps, whose directory a test fills.

    Args:
        run_dir: the run directory.
        monitor: the monitor `m`, as YAML writes it, without its name.
    """

    def __init__(self, run_dir: Path, monitor: str) -> None:
        spec = small_spec(
            "small",
            STEPS,
            f"monitors=[{{name: m, deadline: 5m, {monitor}}}]",
            "evaluations=[{name: held-out, every: 10}]",
        )
        self.path, self.folder = run_dir, monitor_folder(run_dir, "m")
        run_dir.mkdir()
        write_atomic(run_dir / FILE_NAME, dump_resolved(spec))

    def train(self, steps: Iterable[int], *, attempt: int = 1) -> None:
        """Appends rows and samples; rows of another attempt differ."""
        with (self.path / "metrics.jsonl").open("a") as file:
            file.writelines(json.dumps(row(step, attempt)) + "\n" for step in steps)
        with (self.path / "samples.jsonl").open("a") as file:
            for step in steps:
                file.writelines(json.dumps(sample(step, i)) + "\n" for i in range(2))

    def roll_back(self, to: int) -> None:
        for name in ("metrics.jsonl", "samples.jsonl"):
            lines = (self.path / name).read_text().splitlines(keepends=True)
            kept = "".join(line for line in lines if json.loads(line)["step"] < to)
            write_atomic(self.path / name, kept.encode())

    def evaluate(self, *versions: int) -> None:
        store(self.path, *(replace(ZERO, version=version) for version in versions))

    def follow(self) -> None:
        """Sends what is there: nobody holds the run, so it is over."""
        spec = load_resolved(self.path)
        [setting] = spec.monitors
        follow(self.path, spec, setting, threading.Event(), logging.getLogger("monitor-m"))

    def process(self) -> subprocess.Popen[bytes]:
        """The same in a process of its own."""
        command = [sys.executable, "-m", "runspec", "monitor", str(self.path), "m"]
        return subprocess.Popen(command, stderr=subprocess.PIPE)

    def end(self) -> None:
        """Lets a process send the rest."""
        process = self.process()
        told = process.communicate(timeout=DEADLINE_S)[1].decode()
        assert process.returncode == 0, told

    def kill_at(self, entries: int) -> None:
        """Starts a process, and kills it in the middle of a part: so many entries have a number,
        and then the tool writes more."""
        journal, process = self.folder / "journal.jsonl", self.process()

        def wait(condition: Callable[[], bool], what: str) -> None:
            def hopeless() -> str:
                return "it has ended" if process.poll() is not None else ""

            eventually(condition, what, deadline_s=DEADLINE_S, hopeless=hopeless, poll_s=0.001)

        try:
            wait(lambda: journal.exists() and entries <= _numbered(journal), f"{entries} entries")
            before = self._written()
            wait(lambda: self._written() > before, "more from the tool")
        finally:
            process.send_signal(signal.SIGKILL)
            process.communicate(timeout=30)

    def _written(self) -> int:
        """Bytes of the tool's files."""
        own = ("journal.jsonl", "lock")
        paths = (path for path in self.folder.rglob("*") if path.name not in own)
        try:
            return sum(path.stat().st_size for path in paths)
        except FileNotFoundError:  # a temporary one
            return 0


def _numbered(journal: Path) -> int:
    return journal.read_text().count('"key"')


def row(step: int, attempt: int = 1) -> dict[str, Any]:
    figures = {f"figure_{i}": attempt + step / (i + 1) for i in range(KEYS)}
    waits = {"coordinator": 0.5, "input": None}
    return {"step": step, "version": step + 1, "time": 1.7e9 + step, **figures, "waits": waits}


def sample(step: int, i: int) -> dict[str, Any]:
    texts = {"prompt": "# spell\n*cat*", "output": "tac<eos>", "problem_id": f"p{i}"}
    return {"step": step, "version": step, **texts, "target": 8, "length": 4, "reward": 0.5}
