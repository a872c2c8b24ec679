"""No input ends, stalls or fills a parser: a million cases of each fuzz lane.

FUZZ_CASES, FUZZ_SEED and FUZZ_LANES (names, with commas between) choose others.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from runspec.core.process import SUPERVISOR
from tests.fuzz.__main__ import NUMBER
from tests.fuzz.lanes import LANES

ROOT = Path(__file__).resolve().parents[2]
SLOW = {"commands on specs": 50, "requests": 50}
"""Lanes whose cases take tens of milliseconds, and by how much fewer cases they have."""
_ENVIRONMENT = {"OMP_NUM_THREADS": "1"}


class Fault(Exception):
    """A case that does not hold, and the command that makes it again."""


def run() -> dict[str, dict[str, float]]:
    """Runs every lane in a process of its own, as many at a time as there are cores.

    Raises:
        Fault: cases did not hold; all lanes have ended.
    """
    cases = int(os.environ.get("FUZZ_CASES", "1000000"))
    lanes = [name for name in os.environ.get("FUZZ_LANES", "").split(",") if name] or list(LANES)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        ended = list(pool.map(lambda name: _lane(name, max(1, cases // SLOW.get(name, 1))), lanes))
    if faults := [each for each in ended if isinstance(each, str)]:
        raise Fault("\n".join(faults))
    return {lane: each for lane, each in zip(lanes, ended, strict=True) if isinstance(each, dict)}


def _lane(name: str, cases: int) -> dict[str, float] | str:
    """Figures of a lane, or its fault."""
    seed = os.environ.get("FUZZ_SEED", "1")
    with tempfile.NamedTemporaryFile() as seen:
        command = [sys.executable, "-m", "tests.fuzz", name, "--seed", seed]
        done = subprocess.run(
            [*command, "--cases", str(cases), "--seen", seen.name],
            cwd=ROOT,
            env={**os.environ, **_ENVIRONMENT, SUPERVISOR: str(os.getpid())},
            capture_output=True,
            text=True,
            check=False,
        )
        (number,) = NUMBER.unpack(Path(seen.name).read_bytes()[: NUMBER.size] or bytes(8))
    print(f"{name}: exit code {done.returncode}", file=sys.stderr, flush=True)
    if done.returncode:
        again = f"python -m tests.fuzz '{name}' --seed {seed} --from {number}"
        return f"{name}: exit code {done.returncode}\n{done.stderr[-3000:]}\nmake it again: {again}"
    return {**json.loads(done.stdout.splitlines()[-1]), "faults": 0}
