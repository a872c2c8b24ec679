"""The rendered objects are executed: a run of one step finishes, each pod on its own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from runspec.local.snapshot import look_at
from tests.runspec.backends.cluster_run import on_cluster


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_rendered_objects_are_a_run_that_finishes(tmp_path: Path) -> None:
    # given a run of one step, with nothing but what the rendered objects say
    with on_cluster(tmp_path, {"steps": 1, "warm_start.max_updates": 20}) as kubelet:
        trunk, others = kubelet.pod("trunk"), [pod for pod in kubelet.pods if pod.group != "trunk"]
        looked: dict[str, str] = {}
        for _ in kubelet.steps(400):
            if len(looked) < len(others) and all(pod.process for pod in others):
                # then status is there where the run directory is, and that is in no other pod
                words = ("target-short", "--json", "--runs-dir", "/data/runs")
                status = kubelet.execute(trunk, "runspec", "status", *words)
                assert json.loads(status.stdout)["name"] == "target-short", status.stderr
                for pod in others:
                    looked[pod.group] = kubelet.execute(pod, "ls", "/data/runs", "/data").stdout
        # and whoever has work ends by itself once the run is finished
        assert trunk.exits == [0]
        assert {pod.group: pod.exits for pod in others if pod.exits != [0]} == {"relay-local": []}
        assert looked.keys() == {"relay-local", "validators", "volunteers"}
        assert not any("checkpoints" in found or "ledger" in found for found in looked.values())
    run = look_at(tmp_path / "kubelet" / "claims" / "target-short-run" / "runs" / "target-short")
    assert (run.state, run.trained) == ("finished", 1)
