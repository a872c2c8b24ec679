"""Two learner islands on a Ray cluster: the second one's node dies, and another one takes over.

The nodes see nothing of each other's disks. The second island and the server of its shares are on
one node, with its GPU's stand-in. When that dies, both are placed on the other node that has one,
where they begin with empty folders and at another address.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.ray_cluster import Cluster, Node
from tests.e2e.ray_run import NAME, RayRun
from tests.waiting import HANG_S, eventually

pytestmark = pytest.mark.nightly

STEPS = 40
RESOURCES: list[dict[str, float]] = [{}, {"trunk": 1}, {"trains": 1}, {"trains": 1}]
"""Of the nodes: the head, the trunk's, and two of which each can have the second island."""
ASKS = "{trunk: {trunk: 1}, island-b: {trains: 1}}"
ISLANDS = (
    *("learner.islands.count=null", "learner.islands.members=[{name: a}, {name: b}]"),
    *("learner.islands.quorum=1", "learner.islands.grace=10s"),
    *("algorithm.updates_per_step=1", "algorithm.tokens_per_update=4096"),
    *("optimizer.warmup_updates=10", "optimizer.decay_updates=30"),
)


@pytest.fixture(scope="module")
def run() -> Iterator[RayRun]:
    folder = Path(tempfile.mkdtemp(prefix="ri", dir="/tmp"))
    with Cluster(folder, RESOURCES) as cluster:
        run = RayRun(cluster, STEPS, ASKS, *ISLANDS, spec="opendiloco.yaml")
        run.apply()
        yield run
        assert run.process is not None
        run.process.kill()
    shutil.rmtree(folder, ignore_errors=True)


def lines(run: RayRun) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run.dir / "metrics.jsonl").read_text().splitlines()]


def shared(run: RayRun) -> list[int]:
    """Steps whose mean has the second island's share."""
    return [each["step"] for each in lines(run) if "b" in each["islands"]["contributors"]]


def node_of_b(run: RayRun) -> Node:
    """The node with the folder that the second island has in common with its server."""
    url = json.loads((run.dir / "endpoints.json").read_bytes())["shares"]["b"]
    [node] = (node for node in run.cluster.nodes if f"//{node.ip}:" in url)
    assert list(node.folder.glob(f"scratch/{NAME}/*/island-b/store/shares-b"))
    assert not list(node.folder.glob(f"scratch/{NAME}/*/shares-b"))
    return node


def test_an_island_moves_with_its_server_to_another_node(run: RayRun) -> None:
    # given two islands whose shares count
    run.reach(2)
    eventually(lambda: shared(run), "the second island's share", hopeless=run.ended, poll_s=1.0)
    before = node_of_b(run)
    assert before in run.cluster.nodes[2:]
    # when the second one's node dies
    before.kill()
    died = run.steps()
    # then both its processes go on at the other node, and its shares count again
    eventually(
        lambda: [step for step in shared(run) if step > died + 1],
        "a share from the other node",
        hopeless=run.ended,
        context=run.shown,
        poll_s=1.0,
    )
    after = node_of_b(run)
    assert after in run.cluster.nodes[2:] and after is not before
    # and the run comes to its end, with every record as its islands signed it
    assert run.process is not None
    assert run.process.wait(HANG_S) == 0, run.shown()
    run.audit()
