"""How long a cold `runspec lint` of the shipped specs takes, beside Python's own start.

Each sample is a new process, timed from outside (wall) and by the kernel (CPU of the process). The
fastest of many is what the machine can do; the median is what it did. Modules are compiled before
the first sample, as they are after an installation.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
SAMPLES = 15
BAR_S = 0.4


def sample(command: list[str]) -> tuple[float, float]:
    """Wall and CPU seconds of one process that must succeed."""
    start = time.perf_counter()
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL, env=_environment())
    _, status, used = os.wait4(process.pid, 0)
    wall = time.perf_counter() - start
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} exited {process.returncode}")
    return wall, used.ru_utime + used.ru_stime


def _environment() -> dict[str, str]:
    return {key: text for key, text in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}


def figures(command: list[str]) -> dict[str, float]:
    """Seconds over `SAMPLES` processes, after one that compiles and warms the file cache."""
    sample(command)
    walls, cpus = zip(*(sample(command) for _ in range(SAMPLES)), strict=True)
    return {
        "wall_min_s": round(min(walls), 4),
        "wall_median_s": round(statistics.median(walls), 4),
        "cpu_min_s": round(min(cpus), 4),
    }


def main() -> int:
    specs = [str(path.relative_to(ROOT)) for path in sorted((ROOT / "specs").glob("*.yaml"))]
    lint = [sys.executable, "-m", "runspec", "lint", *specs]
    report = {
        "benchmark": "lint_cold",
        "cores": os.cpu_count(),
        "samples": SAMPLES,
        "python_alone": figures([sys.executable, "-c", "pass"]),
        "lint": {"specs": specs, **figures(lint)},
        "bar_s": BAR_S,
    }
    print(json.dumps(report, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
