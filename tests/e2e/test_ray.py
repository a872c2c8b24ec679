"""A run on a Ray cluster of three nodes that see nothing of each other's disks.

Shows: `runspec apply` from a machine that is no node, the learner on two nodes, a validator and a
vLLM sampler on another; every command on the run from there; and a ledger in which every rollout is
trained once. Nodes and processes die in `tests/campaigns/ray_kills.py`.
"""

from __future__ import annotations

import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.ray_cluster import Cluster
from tests.e2e.ray_run import NAME, SAMPLING, RayRun
from tests.site_page import RAY, commands
from tests.waiting import HANG_S, eventually

pytestmark = pytest.mark.nightly

STEPS = 4
RESOURCES = [{"learns": 1}, {"trunk": 1}, {"samples": 1, "checks": 1}]
"""Of the nodes: the head with the learner's second host, the trunk's, and one for the sampler, the
validator and the relay."""
ASKS = (
    "{trunk: {trunk: 1}, learners: {learns: 1}, volunteers: {samples: 1},"
    " validators: {checks: 0.4}, relay-local: {checks: 0.2}}"
)
VALIDATOR = f"scratch/{NAME}/*/validator-0"


@pytest.fixture(scope="module")
def run() -> Iterator[RayRun]:
    # given a cluster, and a run that does not wait for a good start
    folder = Path(tempfile.mkdtemp(prefix="rc", dir="/tmp"))
    with Cluster(folder, RESOURCES) as cluster:
        run = RayRun(cluster, STEPS, ASKS, *SAMPLING, "warm_start.stop_answer_probability=1e-9")
        # when it is applied from a machine that is none of its nodes
        run.apply()
        yield run
        assert run.process is not None
        run.process.kill()
    shutil.rmtree(folder, ignore_errors=True)


def test_a_run_ends_by_itself_and_its_commands_work_from_anywhere(run: RayRun) -> None:
    eventually(
        lambda: list(run.dir.glob("logs/learner*")),
        "the learner starts",
        hopeless=run.ended,
        context=run.shown,
    )
    log = run.cluster.folder / "follow.log"
    follows = run.start("logs", NAME, "-f", "--runs-dir", str(run.runs_dir), output=log)
    run.reach(2)
    assert "validator-0" in run.command("status", NAME)
    # when it comes to its end
    assert run.process is not None
    assert run.process.wait(HANG_S) == 0, run.shown()
    # then every role was on the node that had what it asked for
    assert "finished" in run.command("status", NAME)
    apart = run.cluster.nodes[2]
    assert list(apart.folder.glob(VALIDATOR))
    assert f"http://{apart.ip}:" in (run.dir / "endpoints.json").read_text()
    # and Ctrl-C ends the reading of logs, and what docs/site.md shows works
    eventually(
        lambda: "learner" in log.read_text(), "what the learner logged", context=log.read_text
    )
    follows.send_signal(signal.SIGINT)
    assert follows.wait(HANG_S) == 0, log.read_text()
    for _, words in commands(RAY):
        if words[1] in ("status", "describe", "logs"):
            run.command(*[NAME if word.endswith("target-long") else word for word in words[1:]])
    # and the audit finds each rollout trained once
    run.audit()


def test_no_role_but_the_trunks_has_the_run_directory(run: RayRun) -> None:
    for node in run.cluster.nodes:
        if node is not run.trunk:
            assert not list(node.folder.glob("runs/*/*"))
    assert not list(run.cluster.site.glob("runs/*/state.db"))


def test_delete_removes_it_there_and_the_note_of_it_here(run: RayRun) -> None:
    run.command("delete", NAME, "--yes")
    assert not run.dir.exists()
    assert not (run.runs_dir / NAME).exists()
