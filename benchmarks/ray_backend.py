"""What Ray costs on one machine: runs of the laptop profile by `local` and by `ray`, in turn.

Ratios of `ray` to `local`: from `apply` to its end, and between two steps once both are warm (the
median of the second half). A short run of each kind comes before, which warms caches. The mean task
reward of the last ten steps says that both learn. RAY_STEPS=400 is the quickstart.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

from benchmarks.runs import measure
from runspec.local.endpoints import port_answers

STEPS = int(os.environ.get("RAY_STEPS", "60"))
WARM_STEPS = 10
HOST, STARTS_S = "127.0.0.1", 60.0
ROUNDS = int(os.environ.get("RAY_ROUNDS", "2"))


def main() -> int:
    seconds: dict[str, list[float]] = {"local": [], "ray": []}
    steps: dict[str, list[float]] = {"local": [], "ray": []}
    rewards: dict[str, list[float]] = {"local": [], "ray": []}
    with tempfile.TemporaryDirectory(prefix="runspec-bench-") as folder, cluster() as address:
        site = {"local": {}, "ray": {"placement.backend": "ray", "placement.address": address}}
        for number in range(ROUNDS + 1):
            for kind, placement in site.items():
                begun = time.monotonic()
                values = {
                    "steps": STEPS if number else WARM_STEPS,
                    "storage.scratch": f"{folder}/scratch",
                    "learner.compile_cache": f"{folder}/compiled",
                    **placement,
                }
                run = measure(f"{kind}-{number}", values, Path(folder) / "runs")
                if number:
                    seconds[kind].append(time.monotonic() - begun)
                    times = [row["time"] for row in run.metrics[STEPS // 2 :]]
                    steps[kind].append(statistics.median(b - a for a, b in pairwise(times)))
                    rewards[kind].append(run.summary["task_reward_last"])
    figures = {
        what: {kind: round(statistics.mean(values), 3) for kind, values in of.items()}
        for what, of in (
            ("seconds", seconds),
            ("seconds_a_step", steps),
            ("task_reward_last", rewards),
        )
    }
    for of in figures.values():
        of["ratio"] = round(of["ray"] / of["local"], 2)
    print(json.dumps({"benchmark": "ray_backend", "steps": STEPS, "rounds": ROUNDS, **figures}))
    return 0


@contextmanager
def cluster() -> Iterator[str]:
    """A Ray cluster of this machine alone; its address."""
    with socket.create_server((HOST, 0)) as free:
        port = free.getsockname()[1]
    ray = [str(Path(sys.executable).with_name("ray")), "start", "--head", f"--port={port}"]
    ray += ["--block", "--disable-usage-stats", "--include-dashboard=false"]
    ray += [f"--node-ip-address={HOST}"]
    process = subprocess.Popen(ray, stdout=sys.stderr, start_new_session=True)
    try:
        ends = time.monotonic() + STARTS_S
        while not port_answers(HOST, port) and time.monotonic() < ends:
            time.sleep(0.5)
        yield f"{HOST}:{port}"
    finally:
        os.killpg(process.pid, signal.SIGKILL)  # told to end, it waits for parts that ended
        process.wait(30)


if __name__ == "__main__":
    raise SystemExit(main())
