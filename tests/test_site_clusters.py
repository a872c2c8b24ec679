"""What docs/site.md shows for clusters is called where TARGET-LONG is the small profile.

The commands for Ray are called by `tests/e2e/test_ray.py`. Of Slurm there are stand-ins here;
docs/backends.md says what a real one did.
"""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest
import yaml

from tests.harness import TARGET_SHORT
from tests.runspec.backends.fake_api_server import cluster, fake_api_server
from tests.runspec.cli.in_process import runspec
from tests.site_page import ROOT, commands
from tests.waiting import eventually

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning"),
]
GKE, SLURM = "On a GKE cluster", "On Slurm"
JOB = "7"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the commands are called."""
    done = runspec("render", TARGET_SHORT, "--profile", "laptop", "--set", "name=target-long")
    (tmp_path / "specs").mkdir()
    (tmp_path / "specs" / "target_long.yaml").write_text(done.stdout)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def placement(path: Path, values: Mapping[str, object]) -> None:
    """A placement of a name that the page shows, for a small run."""
    path.parent.mkdir(exist_ok=True)
    head = {"version": "runspec/v1", "kind": "Placement", "name": path.stem}
    path.write_text(yaml.safe_dump({**head, "placement": values}))


def test_the_commands_for_gke(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    image = {"image": "runspec:test", "namespace": "rl"}  # the fake's namespace
    placement(folder / "gke.yaml", {"backend": "kubernetes", "kubernetes": image})
    shown = commands(GKE)
    assert {words[1] for _, words in shown} >= {"plan", "apply", "status", "logs", "pause"}
    with fake_api_server() as server:
        monkeypatch.setenv("KUBECONFIG", str(server.kubeconfig(folder / "kubeconfig")))
        for _, words in shown:
            done = runspec(*words[1:])
            assert done.returncode == 0, done.stderr
        assert server.jobset()["metadata"]["name"] == "target-long"
        # the Services to which the page leads an Ingress
        services = {each["metadata"]["name"] for each in server.objects.values()}
        assert {"target-long-coordinator", "target-long-origin"} <= services
    # and what the page says to copy is there
    assert (ROOT / "specs" / "placements" / "gke.yaml").exists()


def test_the_commands_for_slurm(folder: Path) -> None:
    placement(folder / "specs" / "placements" / "h200.yaml", {})
    env = cluster(
        folder / "bin",
        {
            "scontrol": "echo node1",
            "sbatch": f'bash "$1" >job.log 2>&1 & echo $! >job; echo "Submitted batch job {JOB}"',
            "srun": 'while [ "$1" != ray -a "$1" != runspec ]; do shift; done; exec "$@"',
            "ray": 'while [ "$1" != -- ]; do shift; done; shift; exec "$@"',
            "scancel": "kill -TERM $(cat job)",
            "runspec": 'echo "ran $@"; case $1 in pause) touch paused;; '
            "apply) until [ -e paused ]; do sleep 0.1; done;; esac",
        },
    )
    printed = ""
    for _, shown in commands(SLURM):
        words = [JOB if word == "JOB" else word for word in shown]
        if words[0] == "runspec":
            done = runspec(*words[1:])
        else:
            done = subprocess.run(words, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        printed += done.stdout
        if words[0] == "sbatch":
            eventually(lambda: "ran apply" in (folder / "job.log").read_text(), "the job applies")
    assert f"batch job {JOB}" in printed and "ran status /shared/runs/target-long" in printed
    # then the run was applied with the options that were rendered, and paused
    eventually(lambda: "ran pause" in (folder / "job.log").read_text(), "the job pauses the run")
    applied = (folder / "job.log").read_text().splitlines()[0]
    placed = folder / "specs" / "placements" / "h200.yaml"
    assert applied.endswith(f"--placement {placed} --set placement.backend=ray")
