"""No input ends, stalls or fills a parser: a hundred thousand cases of each fuzz lane.

FUZZ_CASES, FUZZ_SEED and FUZZ_LANES (names, with commas between) choose others.
"""

from __future__ import annotations

import faulthandler
import json
import os
import resource
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from hypothesis import seed, settings

from runspec.core.process import SUPERVISOR, die_with_parent
from tests.fuzz import bounds
from tests.fuzz.lanes import LANES

ROOT = Path(__file__).resolve().parents[2]
SLOW = {"commands on specs": 50, "requests": 50}
"""Lanes whose cases take tens of milliseconds, and by how much fewer cases they have."""
BATCH = 5_000
"""Cases of one run of Hypothesis, which remembers all of them."""
CPU_S, STALL_S = 5.0, 300.0
"""Processor time and wall time of one case."""
MEMORY = 8 << 30
"""Address space of a lane's process."""
_ENVIRONMENT = {"OMP_NUM_THREADS": "1"}


class Fault(Exception):
    """A case that does not hold, and the command that makes it again."""


def run() -> dict[str, dict[str, float]]:
    """Runs every lane in a process of its own, as many at a time as there are cores.

    Raises:
        Fault: cases did not hold; all lanes have ended.
    """
    cases = int(os.environ.get("FUZZ_CASES", "100000"))
    lanes = [name for name in os.environ.get("FUZZ_LANES", "").split(",") if name] or list(LANES)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        ended = list(pool.map(lambda name: _lane(name, max(1, cases // SLOW.get(name, 1))), lanes))
    if faults := [each for each in ended if isinstance(each, str)]:
        raise Fault("\n".join(faults))
    return {lane: each for lane, each in zip(lanes, ended, strict=True) if isinstance(each, dict)}


def _lane(name: str, cases: int) -> dict[str, float] | str:
    """Figures of a lane, or its fault."""
    number = os.environ.get("FUZZ_SEED", "1")
    done = subprocess.run(
        [sys.executable, "-m", "tests.campaigns.fuzz", name, number, str(cases)],
        cwd=ROOT,
        env={**os.environ, **_ENVIRONMENT, SUPERVISOR: str(os.getpid())},
        capture_output=True,
        text=True,
        check=False,
    )
    print(f"{name}: exit code {done.returncode}", file=sys.stderr, flush=True)
    if done.returncode:
        again = f"python -m tests.campaigns.fuzz '{name}' {number} {cases}"
        said = f"{done.stdout[-3000:]}{done.stderr[-3000:]}"
        return f"{name}: exit code {done.returncode}\n{said}\nmake it again: {again}"
    return {**json.loads(done.stdout.splitlines()[-1]), "faults": 0}


def figures_of(name: str, number: int, cases: int) -> dict[str, float]:
    """Runs cases of a lane in this process; returns cases, sound ones, microseconds each.

    Raises:
        Exception: a case did not hold; Hypothesis adds the smallest one that it finds.
    """
    lane = replace(LANES[name], parse=_timed(LANES[name].parse))
    taken, begun = 0, time.process_time()
    for first in range(0, cases, BATCH):
        options = settings(max_examples=min(BATCH, cases - first))
        taken += bounds.run(lane, options, seed(number * 10**9 + first))[True]
    spent_us = 1e6 * (time.process_time() - begun)
    return {"cases": cases, "sound": taken, "us": round(spent_us / cases)}


def _timed(parse: bounds.Parse) -> bounds.Parse:
    """The parser, which fails where it takes long, and ends the process where it hangs."""

    def timed(given: Any) -> Any:
        faulthandler.dump_traceback_later(STALL_S, exit=True)
        begun = time.thread_time()
        try:
            return parse(given)
        finally:
            faulthandler.cancel_dump_traceback_later()
            assert time.thread_time() - begun < CPU_S

    return timed


if __name__ == "__main__":
    if SUPERVISOR in os.environ:
        die_with_parent()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, resource.RLIM_INFINITY))
    print(json.dumps(figures_of(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))))
