"""`runspec render --backend slurm`: an sbatch script, run with stand-ins for Slurm and Ray."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path

import pytest

from tests.harness import ROOT, TARGET_SHORT
from tests.runspec.backends.stand_ins import cluster
from tests.runspec.cli.in_process import runspec

SPECS = ROOT / "specs"
H200 = (SPECS / "target_long.yaml", "--placement", SPECS / "placements" / "h200.yaml")
STAND_INS = {
    "scontrol": "echo node1; echo node2",
    "srun": 'shift; exec "$@"',
    "ray": 'echo "$@"; while [ "$1" != -- ]; do shift; done; shift; exec "$@"',
    "runspec": 'printf "%s\\n" "$@"',
}
"""Commands of a cluster, which say what they are called with."""
RAY_STOP_S = 16 + 5
"""That `ray stop` gives processes to end, and then to be killed."""


def rendered(folder: Path, *words: str | Path) -> str:
    script = folder / "run.sbatch"
    done = runspec("render", *words, "--backend", "slurm", "-o", script)
    assert done.returncode == 0, done.stderr
    return script.read_text()


def options(script: str) -> dict[str, str]:
    lines = [line for line in script.splitlines() if line.startswith("#SBATCH --")]
    return {name: value for name, _, value in (line[10:].partition("=") for line in lines)}


def test_the_script_starts_ray_on_the_allocation_and_applies_the_spec(tmp_path: Path) -> None:
    # given options that a shell would take apart
    words = (TARGET_SHORT, "--profile", "laptop", "--set", "reward.length.targets=[8, 16]")
    script = rendered(tmp_path, *words)
    env = cluster(tmp_path, STAND_INS)
    # when Slurm runs it
    done = subprocess.run(["bash", "-c", script], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    ray, *applied = done.stdout.splitlines()
    # then Ray has both nodes, and the spec is applied with the same options
    assert ray.startswith("symmetric-run --address node1:6379 --min-nodes 2 -- runspec apply")
    wanted = ["apply", *map(str, words), "--set", "placement.backend=ray"]
    assert applied == wanted and len(shlex.split(script)) > len(wanted)


def test_the_run_is_paused_before_its_time_is_up(tmp_path: Path) -> None:
    # given an apply that goes on until somebody pauses the run
    apply = (
        'if [ "$1" = pause ]; then touch paused; else until [ -e paused ]; do sleep 0.1; done; fi'
    )
    script = rendered(tmp_path, TARGET_SHORT, "--profile", "laptop", "--runs-dir", tmp_path)
    env = cluster(tmp_path, {**STAND_INS, "runspec": f"echo $1 $2; cd {tmp_path}; {apply}"})
    job = subprocess.Popen(["bash", "-c", script], env=env, stdout=subprocess.PIPE, text=True)
    assert job.stdout is not None
    assert job.stdout.readline().startswith("symmetric-run")
    assert job.stdout.readline().startswith("apply")
    # when Slurm warns the script, then the run is paused, and the job ends well
    job.terminate()
    out, _ = job.communicate(timeout=30)
    assert (job.returncode, out) == (0, f"pause {tmp_path / 'target-short'}\n")


def test_the_other_nodes_end_before_srun_kills_them(tmp_path: Path) -> None:
    # given a real Slurm, where a task that `srun --wait` kills fails the job of a finished run
    script = rendered(tmp_path, TARGET_SHORT, "--profile", "laptop")
    srun = 'echo "${1#--wait=} $RAY_gcs_rpc_server_reconnect_timeout_s"'
    done = subprocess.run(
        ["bash", "-c", script],
        env=cluster(tmp_path, {**STAND_INS, "srun": srun}),
        capture_output=True,
        text=True,
    )
    # then Ray has the time to miss its first node and to stop, but not while that node still stops
    kills, misses = map(int, done.stdout.split())
    assert RAY_STOP_S < misses < kills - RAY_STOP_S


def test_it_asks_for_the_nodes_that_the_hardware_fills(tmp_path: Path) -> None:
    # 8 hosts of 8 for the learner; 32 samplers and 8 validators of 2, of which a node takes 4
    asked = options(rendered(tmp_path, *H200))
    assert (asked["nodes"], asked["gpus-per-node"]) == ("18", "8")
    assert asked["signal"] == "B:TERM@300" and "requeue" in asked
    # CPUs need no more than the learner's hosts
    asked = options(rendered(tmp_path, TARGET_SHORT, "--profile", "laptop"))
    assert asked["nodes"] == "1" and "gpus-per-node" not in asked


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((TARGET_SHORT,), "which Slurm does not allocate"),
        (
            (*H200, "--set", "learner.hosts=64"),
            "needs 2 devices on a node, the learner's have 1",
        ),
        ((SPECS / "opendiloco.yaml",), "one cluster of Ray, which places no islands"),
    ],
)
def test_what_no_allocation_fits_is_said(
    words: tuple[str | Path, ...], message: str, tmp_path: Path
) -> None:
    done = runspec("render", *words, "--backend", "slurm", "-o", tmp_path / "run.sbatch")
    assert done.returncode == 1 and message in done.stderr
    assert not list(tmp_path.iterdir())


def test_a_backend_needs_a_place_to_write(tmp_path: Path) -> None:
    done = runspec("render", TARGET_SHORT, "--profile", "laptop", "--backend", "slurm")
    assert done.returncode == 2 and "say where to with -o" in done.stderr
