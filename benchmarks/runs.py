"""Whole runs as measurements: apply a shipped spec with overrides, read its summary and metrics."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SPEC = "specs/target_short.yaml"
ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class MeasuredRun:
    summary: dict[str, Any]
    metrics: list[dict[str, Any]]
    """A dict a step, as in metrics.jsonl."""


def apply_command(name: str, overrides: dict[str, Any], runs_dir: Path) -> list[str]:
    """The command that starts, or goes on with, a run of the laptop profile of TARGET-SHORT."""
    command = [sys.executable, "-m", "runspec", "apply", str(ROOT / SPEC)]
    command += ["--profile", "laptop", "--runs-dir", str(runs_dir), "--set", f"name={name}"]
    for path, value in overrides.items():
        command += ["--set", f"{path}={value}"]
    return command


def measure(name: str, overrides: dict[str, Any], runs_dir: Path | None = None) -> MeasuredRun:
    """Applies the laptop profile of TARGET-SHORT and waits for its end.

    Raises:
        subprocess.CalledProcessError: the run failed; its output has been shown.
    """
    with tempfile.TemporaryDirectory(prefix="runspec-bench-") as temporary:
        folder = runs_dir or Path(temporary) / "runs"
        command = apply_command(name, overrides, folder)
        print("+", *command, file=sys.stderr, flush=True)
        subprocess.run(command, check=True, stdout=sys.stderr)
        run_dir = folder / name
        lines = (run_dir / "metrics.jsonl").read_text().splitlines()
        return MeasuredRun(
            json.loads((run_dir / "summary.json").read_text()), [json.loads(line) for line in lines]
        )
