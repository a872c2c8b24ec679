"""Rendered Kubernetes objects are a run that ends with every step once, whichever pod is killed.

The laptop profile with two learner hosts, on the test double of a cluster: process 1 of each pod is
killed in turn, the trunk's too.
"""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from runspec.local.metrics import read_rows
from runspec.local.run_view import look_at
from tests.runspec.backends.fake_kubelet import Pod, on_cluster

STEPS = 300
AFTER_S = 10.0
"""Between a pod's start and its death."""


def run() -> Mapping[str, object]:
    began = time.monotonic()
    overrides = {"steps": STEPS, "learner.hosts": 2, "warm_start.max_updates": 20}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        run_dir = path / "kubelet" / "claims" / "target-short-run" / "runs" / "target-short"
        with on_cluster(path, overrides) as kubelet:
            alive_since: dict[str, float] = {}
            left: list[Pod] = list(kubelet.pods)
            for _ in kubelet.steps(1800):
                now = time.monotonic()
                up = [pod for pod in left if pod.process is not None]
                since = {pod.host: alive_since.setdefault(pod.host, now) for pod in up}
                old = [pod for pod in up if now - since[pod.host] > AFTER_S]
                if old and len(up) == len(left) and _trained(run_dir):
                    os.kill(old[0].process_1(), signal.SIGKILL)
                    left.remove(old[0])
                    alive_since.clear()
            exits = {pod.group: len(pod.exits) for pod in kubelet.pods}
        rows = read_rows(run_dir)
        assert not left, f"not killed in time: {[pod.host for pod in left]}"
        assert [row["step"] for row in rows] == list(range(STEPS))
        assert all(row["complete"] for row in rows)
        state = look_at(run_dir).state
    return {
        "steps": STEPS,
        "pods killed": len(exits),
        "state": state,
        "seconds": round(time.monotonic() - began),
    }


def _trained(run_dir: Path) -> bool:
    return (run_dir / "metrics.jsonl").exists()
