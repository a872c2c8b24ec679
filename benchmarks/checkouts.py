"""CPU seconds of common commands in two checkouts, in alternating pairs; prints JSON.

    python -m benchmarks.checkouts ../before . --pairs 10 --rows help lint plan update run

Each checkout has an environment of its own (`make install`), whose commands run in it. Seconds are
those of the process and of all its descendants. A pair runs both checkouts, one after the other, in
an order that alternates; its ratio is the second checkout's seconds over the first's. A row has the
median ratio and its interval: from the second-smallest to the second-largest ratio, which holds the
true median with a chance of 97.9 % for ten pairs. A slower checkout is a fault only where the whole
interval lies above 1.03.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

SPEC = "specs/target_short.yaml"
FAULT = 1.03
STEPS = 4
"""Trained steps that the long run of `run` has beyond the short run's one."""


def cpu_seconds(checkout: Path, *words: str) -> float:
    """User and system seconds of a command of the checkout, descendants included.

    Raises:
        SystemExit: the command failed.
    """
    command = [str(checkout / ".venv" / "bin" / "python"), "-m", *words]
    process = subprocess.Popen(
        command, cwd=checkout, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} exited {process.returncode} in {checkout}")
    return used.ru_utime + used.ru_stime


def update_seconds(checkout: Path) -> float:
    """Seconds of one optimizer update at the laptop's shape, without compilation."""
    command = [str(checkout / ".venv" / "bin" / "python"), "-m", "benchmarks.learner_step"]
    done = subprocess.run(command, cwd=checkout, check=True, capture_output=True, text=True)
    return float(json.loads(done.stdout)["seconds"]["update"])


def applied(checkout: Path, steps: int) -> float:
    """CPU seconds of a laptop run of so many steps, without its evaluations."""
    with tempfile.TemporaryDirectory(prefix="checkouts-") as folder:
        words = ["--profile", "laptop", "--runs-dir", folder]
        for change in (f"steps={steps}", "evaluations=null", "name=checkouts"):
            words += ["--set", change]
        return cpu_seconds(checkout, "runspec", "apply", SPEC, *words)


def run_seconds(checkout: Path) -> dict[str, float]:
    """CPU seconds of start, first step and end together, and of each further step."""
    first, all_steps = applied(checkout, 1), applied(checkout, 1 + STEPS)
    return {"first step": first, "step": (all_steps - first) / STEPS}


ROWS: dict[str, Callable[[Path], float | dict[str, float]]] = {
    "help": lambda checkout: cpu_seconds(checkout, "runspec", "--help"),
    "lint": lambda checkout: cpu_seconds(checkout, "runspec", "lint", SPEC),
    "plan": lambda checkout: cpu_seconds(checkout, "runspec", "plan", SPEC, "--profile", "laptop"),
    "update": update_seconds,
    "run": run_seconds,
}


def compared(row: str, before: Path, after: Path, pairs: int) -> dict[str, dict[str, object]]:
    """Figures of the row by their name: medians, median ratio, its interval, whether it is a fault.

    The first pair warms caches and is not counted.
    """
    samples: dict[str, tuple[list[float], list[float]]] = {}
    for number in range(pairs + 1):
        order = (before, after) if number % 2 else (after, before)
        taken = {checkout: ROWS[row](checkout) for checkout in order}
        if number == 0:
            continue
        for side, checkout in enumerate((before, after)):
            value = taken[checkout]
            for name, seconds in (value if isinstance(value, dict) else {row: value}).items():
                samples.setdefault(name, ([], []))[side].append(seconds)
    figures: dict[str, dict[str, object]] = {}
    for name, (old, new) in samples.items():
        ratios = sorted(b / a for a, b in zip(old, new, strict=True))
        figures[name] = {
            "before_s": round(statistics.median(old), 4),
            "after_s": round(statistics.median(new), 4),
            "ratio": round(statistics.median(ratios), 3),
            "interval": [round(ratios[1], 3), round(ratios[-2], 3)],
            "fault": ratios[1] > FAULT,
        }
    return figures


def main() -> int:
    """Runs the rows; exits with 1 where one is a fault."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.checkouts", description=__doc__)
    parser.add_argument("before", type=lambda text: Path(text).resolve())
    parser.add_argument("after", type=lambda text: Path(text).resolve())
    parser.add_argument("--pairs", type=int, default=10, help="at least 3")
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    options = parser.parse_args()
    if options.pairs < 3:
        parser.error("--pairs is at least 3: an interval drops the smallest and largest ratio")
    figures: dict[str, dict[str, object]] = {}
    for row in options.rows:
        figures |= compared(row, options.before, options.after, options.pairs)
        print(row, figures, file=sys.stderr, flush=True)
    print(json.dumps({"benchmark": "checkouts", "pairs": options.pairs, "rows": figures}, indent=1))
    return int(any(each["fault"] for each in figures.values()))


if __name__ == "__main__":
    raise SystemExit(main())
