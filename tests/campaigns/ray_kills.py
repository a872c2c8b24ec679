"""Nodes and processes of a run on Ray are killed, and nothing is lost.

A run of the laptop profile on five nodes in namespaces of their own: the head, the trunk's, one of
the learner's, a sampler's and a validator's. In turn a node dies as by a loss of power and comes
back with its disk, and processes of the trunk are killed. The run must come to its end by itself,
with each step trained once and a clean audit.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from tests.e2e.ray_cluster import Cluster
from tests.e2e.ray_run import RayRun

RESOURCES = [{}, {"trunk": 1}, {"learns": 1}, {"samples": 1}, {"checks": 1}]
ASKS = (
    "{trunk: {trunk: 1}, learners: {learns: 1}, volunteers: {samples: 1},"
    " validators: {checks: 0.4}, relay-local: {checks: 0.2}}"
)
ROUNDS = int(os.environ.get("RAY_ROUNDS", "1"))
BETWEEN = 6
"""Steps between two kills."""


def run() -> dict[str, dict[str, object]]:
    """Seconds until the next step after each kill.

    Raises:
        AssertionError: the run did not end, or not with each step trained once.
    """
    found: dict[str, dict[str, object]] = {}
    folder = Path(tempfile.mkdtemp(prefix="rk", dir="/tmp"))
    with Cluster(folder, RESOURCES) as cluster:
        kills: dict[str, Callable[[], None]] = {
            name: lambda at=at: _power_cut(cluster, at)
            for at, name in enumerate(
                (
                    "trunk's node",
                    "learner's second node",
                    "sampler's node",
                    "validator's node",
                ),
                1,
            )
        }
        processes = {
            "learner's process 0": "learner_jax train",
            "coordinator": "verify coordinator",
            "publisher": "learner_jax publish",
        }
        kills |= {
            name: lambda words=words: _kill_process(cluster, words)
            for name, words in processes.items()
        }
        run = RayRun(cluster, BETWEEN * (ROUNDS * len(kills) + 2), ASKS)
        run.apply()
        run.reach(BETWEEN)
        run.pause_and_go_on()
        for number in range(ROUNDS):
            for name, kill in kills.items():
                before, begun = run.steps(), time.monotonic()
                kill()
                run.reach(before + BETWEEN, alone=True)
                seconds = round(time.monotonic() - begun, 1)
                found[name if ROUNDS == 1 else f"{name}, {number + 1}"] = {
                    "seconds until 6 more steps": seconds
                }
                print(name, seconds, file=sys.stderr, flush=True)
        run.reach(run.all_steps, alone=True)
        run.await_state("finished")
        run.audit()
    shutil.rmtree(folder, ignore_errors=True)
    return found


def _power_cut(cluster: Cluster, at: int) -> None:
    node = cluster.nodes[at]
    node.kill()
    time.sleep(5.0)
    node.start()


def _kill_process(cluster: Cluster, words: str) -> None:
    """Kills a role of the trunk, as this machine sees its processes."""
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            if f"-m {words}" in line and str(cluster.site) in line and "--process 1" not in line:
                os.kill(int(entry.name), signal.SIGKILL)
