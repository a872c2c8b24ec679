"""A run on a Ray cluster of four nodes that see nothing of each other's disks, one of which dies.

Shows: `runspec apply` from a machine that is no node, the learner on two nodes, validators and
vLLM samplers on others; every command on the run from there; a node that is killed, whose roles
start on another; and a ledger in which every rollout is trained once.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.ray_cluster import Cluster, Node
from tests.harness import ROOT
from tests.waiting import eventually

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

STEPS, NAME = 16, "target-short"
RESOURCES = [{"learns": 1}, {"trunk": 1}, {"checks": 1}, {"samples": 1, "checks": 1}]
"""Of the nodes: the head with the learner's second host, the trunk's, a validator's, and a
sampler's that may check too."""
ASKS = (
    "{trunk: {trunk: 1}, learners: {learns: 1}, volunteers: {samples: 1},"
    " validators: {checks: 0.4}, relay-local: {checks: 0.2}}"
)
PATIENCE_S = 240.0


class RayRun:
    """A run that a machine beside the cluster starts and watches."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.runs_dir = cluster.site / "runs"
        self.output = cluster.folder / "apply.log"
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def trunk(self) -> Node:
        return self.cluster.nodes[1]

    @property
    def dir(self) -> Path:
        """The run directory, as this test alone may look at it."""
        return self.trunk.folder / "runs" / NAME

    def words(self) -> list[str]:
        values = (
            f"steps={STEPS}",
            "placement.backend=ray",
            f"placement.address={self.cluster.address}",
            f"placement.resources={ASKS}",
            f"storage.dir={self.runs_dir}",
            f"storage.scratch={self.cluster.site}/scratch",
            "checkpoints.every=2",
            f"checkpoints.dir={self.cluster.folder}/checkpoints",
            "learner.hosts=2",
            f"learner.compile_cache={self.cluster.folder}/compiled",
            "verify.lease_timeout=30s",
        )
        spec = str(ROOT / "specs" / "target_short.yaml")
        return [spec, "--profile", "laptop", *(word for v in values for word in ("--set", v))]

    def apply(self) -> None:
        with self.output.open("ab") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "runspec", "apply", *self.words()],
                stdout=out,
                stderr=subprocess.STDOUT,
                cwd=self.cluster.folder,
            )

    def command(self, *words: str, code: int = 0) -> str:
        done = subprocess.run(
            [sys.executable, "-P", "-m", "runspec", *words, "--runs-dir", str(self.runs_dir)],
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout

    def steps(self) -> int:
        """Steps that are trained."""
        path = self.dir / "metrics.jsonl"
        return len(path.read_text().splitlines()) if path.exists() else 0

    def shown(self) -> str:
        return self.output.read_text()[-4000:]

    def ended(self) -> str:
        process = self.process
        return f"`apply` ended ({process.returncode})" if process and process.poll() else ""

    def reach(self, step: int) -> None:
        eventually(
            lambda: self.steps() >= step,
            f"step {step} is trained",
            deadline_s=PATIENCE_S,
            hopeless=self.ended,
            context=self.shown,
        )


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayRun]:
    # given a cluster, and a start that was trained before
    cache = tmp_path_factory.getbasetemp() / ".cache" / "warm_start"
    folder = Path(tempfile.mkdtemp(prefix="rc", dir="/tmp"))
    with Cluster(folder, RESOURCES) as cluster:
        run = RayRun(cluster)
        if cache.exists():
            shutil.copytree(cache, run.trunk.folder / ".cache" / "warm_start")
        # when it is applied from a machine that is none of its nodes
        run.apply()
        yield run
        assert run.process is not None
        run.process.kill()
    shutil.rmtree(folder, ignore_errors=True)


def test_a_run_outlives_a_node_and_its_commands_work_from_anywhere(run: RayRun) -> None:
    run.reach(2)
    # when the node with the validator and the relay dies
    run.cluster.nodes[2].kill()
    # then they start on another, and the run goes on
    status = run.command("status", NAME)
    assert "validator-0" in status and "running" in status
    run.reach(4)
    assert (run.cluster.nodes[3].folder / "scratch" / NAME / "validator-0").is_dir()
    # when it is paused from here
    run.command("pause", NAME)
    assert run.process is not None and run.process.wait(60) == 0
    assert "paused" in run.command("status", NAME)
    # and goes on, then it comes to its end
    run.command("resume", NAME)
    assert run.steps() == STEPS
    assert "finished" in run.command("status", NAME)
    assert "learner" in run.command("logs", NAME, "--role", "learner", "--tail", "3")
    # and the audit finds each rollout trained once
    audit = [sys.executable, "-m", "verify", "audit", str(run.dir)]
    done = subprocess.run(audit, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_no_role_but_the_trunks_has_the_run_directory(run: RayRun) -> None:
    for node in run.cluster.nodes:
        if node is not run.trunk:
            assert not list(node.folder.glob("runs/*/*"))
    assert not list(run.cluster.site.glob("runs/*/state.db"))


def test_delete_removes_it_there_and_the_note_of_it_here(run: RayRun) -> None:
    run.command("delete", NAME, "--yes")
    assert not run.dir.exists()
    assert not (run.runs_dir / NAME).exists()
