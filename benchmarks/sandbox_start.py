"""Start of isolated interpreters against plain ones: `python -m benchmarks.sandbox_start`.

Each start runs an empty program and waits for its end, `--parallel` at a time. Prints JSON: seconds
a start, wall clock, of plain `subprocess` and of the sandbox under each set of mechanisms that
works here, and their ratio to plain.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from sampler.sandbox import PYTHON, Limits, probe, run
from sampler.sandbox.process import SET_A, SET_B

COMMAND = [*PYTHON, "-S", "-c", "pass"]
LIMITS = Limits(wall_s=60.0)


def main() -> None:
    """Measures, in turns so that a busy machine is busy for all, and prints the medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--starts", type=int, default=328, help="programs a round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--parallel", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    working = set(probe().working)
    ways: dict[str, Callable[[], object]] = {"plain": _plain}
    for name, mechanisms in (("A", SET_A), ("B", SET_B), ("default", tuple(probe().working))):
        if set(mechanisms) <= working:
            ways[name] = lambda mechanisms=mechanisms: _isolated(mechanisms)
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(options.rounds):
        for name, way in ways.items():
            seconds[name].append(_round(way, options.starts, options.parallel))
    medians = {name: statistics.median(rows) for name, rows in seconds.items()}
    report = {
        "starts": options.starts,
        "rounds": options.rounds,
        "parallel": options.parallel,
        "seconds_a_round": {name: round(value, 3) for name, value in medians.items()},
        "ms_a_start": {n: round(1e3 * v / options.starts, 2) for n, v in medians.items()},
        "ratio_to_plain": {n: round(v / medians["plain"], 2) for n, v in medians.items()},
    }
    print(json.dumps(report))


def _plain() -> None:
    subprocess.run(COMMAND, check=True, stdin=subprocess.DEVNULL, capture_output=True)


def _isolated(mechanisms: tuple[str, ...]) -> None:
    finished = run(COMMAND, limits=LIMITS, mechanisms=mechanisms)
    if not finished.ok:
        raise RuntimeError(f"the program ended otherwise: {finished}")


def _round(way: Callable[[], object], starts: int, parallel: int) -> float:
    """Seconds for all starts."""
    begin = time.perf_counter()
    with ThreadPoolExecutor(parallel) as pool:
        for future in [pool.submit(way) for _ in range(starts)]:
            future.result()
    return time.perf_counter() - begin


if __name__ == "__main__":
    main()
