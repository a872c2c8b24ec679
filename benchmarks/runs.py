"""Whole runs as measurements: apply a shipped spec with overrides, read its summary and metrics."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from runspec.core.process import EXIT_FINAL

SPEC = "specs/target_short.yaml"
ROOT = Path(__file__).resolve().parent.parent
LOOK_S = 2.0


@dataclass(frozen=True)
class MeasuredRun:
    summary: dict[str, Any]
    metrics: list[dict[str, Any]]
    """A dict a step, as in metrics.jsonl."""
    cpu_s: dict[str, float]
    """Processor seconds by role, with those of its children, up to its last two seconds."""


def apply_command(
    name: str, overrides: dict[str, Any], runs_dir: Path, spec: str = SPEC
) -> list[str]:
    """The command that starts, or goes on with, a run of a spec's laptop profile."""
    command = [sys.executable, "-m", "runspec", "apply", str(ROOT / spec)]
    command += ["--profile", "laptop", "--runs-dir", str(runs_dir), "--set", f"name={name}"]
    for path, value in overrides.items():
        command += ["--set", f"{path}={value}"]
    return command


def measure(
    name: str,
    overrides: dict[str, Any],
    runs_dir: Path | None = None,
    spec: str = SPEC,
    *,
    may_stall: bool = False,
) -> MeasuredRun:
    """Applies the laptop profile of a spec and waits for its end.

    Args:
        name, overrides, runs_dir, spec: as of `apply_command`; without a folder a temporary one.
        may_stall: whether a run that cannot go on is measured up to there.

    Raises:
        subprocess.CalledProcessError: the run failed; its output has been shown.
    """
    with tempfile.TemporaryDirectory(prefix="runspec-bench-") as temporary:
        folder = runs_dir or Path(temporary) / "runs"
        command = apply_command(name, overrides, folder, spec)
        print("+", *command, file=sys.stderr, flush=True)
        with subprocess.Popen(command, stdout=sys.stderr) as process:
            cpu_s = _cpu_seconds(process)
        if process.returncode != 0 and not (may_stall and process.returncode == EXIT_FINAL):
            raise subprocess.CalledProcessError(process.returncode, command)
        run_dir = folder / name
        lines = (run_dir / "metrics.jsonl").read_text().splitlines()
        return MeasuredRun(
            json.loads((run_dir / "summary.json").read_text()),
            [json.loads(line) for line in lines],
            cpu_s,
        )


def _cpu_seconds(process: subprocess.Popen[bytes]) -> dict[str, float]:
    """Waits for the supervisor's end, and returns the processor seconds of its roles."""
    supervisor = psutil.Process(process.pid)
    seen: dict[tuple[str, int], float] = {}
    while process.poll() is None:
        with suppress(psutil.NoSuchProcess):
            for role in supervisor.children():
                with suppress(psutil.NoSuchProcess):
                    words = role.cmdline()
                    name = words[words.index("runspec.role") + 1] if "runspec.role" in words else ""
                    times = [each.cpu_times() for each in (role, *role.children(recursive=True))]
                    seen[name or "others", role.pid] = sum(sum(each[:4]) for each in times)
        time.sleep(LOOK_S)
    total = defaultdict[str, float](float)
    for (name, _), seconds in seen.items():
        total[name] += seconds
    return total
