"""Nodes and processes of runs on Ray are killed at random times, and nothing is lost.

Runs of the laptop profile, on five nodes in namespaces of their own: the head, the trunk's, one of
the learner's, a sampler's and a validator's. A node dies as by a loss of power and comes back with
its disk; single processes of the trunk are killed too. In the first run each of them is killed once
and the time is taken until the run goes on. In the others they are killed at random times, also
while the run recovers. Every run must come to its end by itself, with each step trained once and a
clean audit.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.e2e.ray_cluster import Cluster
from tests.e2e.ray_run import SAMPLING, RayRun

RESOURCES: list[Mapping[str, float]] = [
    {},
    {"trunk": 1},
    {"learns": 1},
    {"samples": 1},
    {"checks": 1},
]
ASKS = (
    "{trunk: {trunk: 1}, learners: {learns: 1}, volunteers: {samples: 1},"
    " validators: {checks: 0.4}, relay-local: {checks: 0.2}}"
)
NODES = ("trunk's node", "learner's second node", "sampler's node", "validator's node")
"""After the head, which Ray cannot lose."""
PROCESSES = {
    "learner's process 0": "runspec.role learner ",
    "coordinator": "runspec.role coordinator",
    "publisher": "runspec.role publisher",
}
KILLS = (*NODES, *PROCESSES)
RUNS, EACH = int(os.environ.get("RAY_RUNS", "10")), int(os.environ.get("RAY_KILLS", "10"))
"""Runs with kills at random times, and kills of each."""
STEPS, GAP_S = 30, 12.0
"""Of a run with random kills, and the longest time between two of these."""
BETWEEN = 6
"""Steps between two kills that are timed."""
OFF_S = 5.0
"""How long a node without power stays off."""


def run() -> dict[str, dict[str, object]]:
    """Seconds until the run goes on after each kind of kill; then what the random kills were.

    Raises:
        AssertionError: a run did not end, or not with each step trained once.
    """
    found: dict[str, dict[str, object]] = {}
    with _started(BETWEEN * (len(KILLS) + 2)) as run:
        run.reach(2)
        assert "placement.restarts" in run.change("placement.restarts=31")
        run.interrupt_and_go_on()
        run.reach(4)
        run.pause_and_go_on()
        for name in KILLS:
            before, begun = run.steps(), time.monotonic()
            _kill(run.cluster, name)
            run.reach(before + BETWEEN, alone=True)
            took_s = round(time.monotonic() - begun, 1)
            found[name] = {f"seconds until {BETWEEN} more steps": took_s}
            print(name, took_s, file=sys.stderr, flush=True)
        _finish(run)
    made: Counter[str] = Counter()
    seconds: list[int] = []
    for number in range(RUNS):
        begun = time.monotonic()
        made += _randomly(random.Random(number))
        seconds.append(round(time.monotonic() - begun))
        print(f"random run {number}", made, seconds[-1], file=sys.stderr, flush=True)
    took = f"{min(seconds)} to {max(seconds)}"
    found["random kills"] = {"runs": RUNS, "kills": made.total(), **made, "seconds of a run": took}
    return found


def _randomly(rng: random.Random) -> Counter[str]:
    made = Counter[str]()
    with _started(STEPS) as run:
        run.reach(2)
        while made.total() < EACH and run.steps() < STEPS:
            time.sleep(rng.uniform(0.0, GAP_S))
            name = rng.choice(KILLS)
            _kill(run.cluster, name)
            made[name] += 1
        _finish(run)
    return made


@contextmanager
def _started(steps: int) -> Iterator[RayRun]:
    folder = Path(tempfile.mkdtemp(prefix="rk", dir="/tmp"))
    with Cluster(folder, RESOURCES) as cluster:
        # so many kills end a role more often in a row than any site does
        run = RayRun(cluster, steps, ASKS, *SAMPLING, "placement.restarts=30")
        run.apply()
        yield run
    shutil.rmtree(folder, ignore_errors=True)


def _finish(run: RayRun) -> None:
    run.reach(run.all_steps, alone=True)
    run.await_state("finished")
    run.audit()


def _kill(cluster: Cluster, name: str) -> None:
    if name in PROCESSES:
        _kill_process(cluster, PROCESSES[name])
        return
    node = cluster.nodes[1 + NODES.index(name)]
    node.kill()
    time.sleep(OFF_S)
    node.start()


def _kill_process(cluster: Cluster, words: str) -> None:
    """Kills a role of the trunk, as this machine sees its processes."""
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            if f"-m {words}" in line and str(cluster.site) in line:
                os.kill(int(entry.name), signal.SIGKILL)
