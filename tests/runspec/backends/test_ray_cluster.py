"""Which node has the trunk, and what each role group asks Ray for."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from runspec.backends.ray.cluster import (
    choose_trunk,
    connect,
    demands,
    find_keeper,
    line_of,
    options,
)
from runspec.core.errors import UserError
from runspec.local.site import groups_of
from tests.runspec.local.fake_run import small_spec


class FakeRay:
    """What `ray.nodes` and `list_named_actors` would say."""

    def __init__(self, *nodes: dict[str, Any], actors: tuple[str, ...] = ()) -> None:
        self._nodes, self._actors = nodes, actors
        self.util = self

    def nodes(self) -> tuple[dict[str, Any], ...]:
        return self._nodes

    def list_named_actors(self, *, all_namespaces: bool) -> list[dict[str, str]]:
        return [{"name": name, "namespace": "runspec"} for name in self._actors]


def node(ip: str, *, alive: bool = True, **resources: float) -> dict[str, Any]:
    return {"NodeManagerAddress": ip, "Alive": alive, "Resources": resources, "Labels": {}}


GPUS = small_spec(
    "small",
    5,
    "learner.hardware={kind: h100-80g, count: 8}",
    "learner.hosts=2",
    "learner.mesh.fsdp=8",
    "checkpoints.dir=s3://bucket/runs",
    "verify.hardware={kind: h100-80g, count: 2}",
    "placement.resources={trunk: {disk: 1}}",
)


def test_each_host_of_the_learner_asks_for_its_share_of_accelerators():
    groups = {group.name: group for group in groups_of(GPUS)}
    assert demands(GPUS, groups["trunk"]) == {"disk": 1, "GPU": 4}
    assert demands(GPUS, groups["learners"]) == {"GPU": 4}
    assert demands(GPUS, groups["validators"]) == {"GPU": 2}
    assert demands(GPUS, groups["relay-local"]) == {}


def test_resources_of_rays_own_names_are_options_of_their_own():
    assert options({"GPU": 4, "disk": 1}) == {
        "num_cpus": 0,
        "num_gpus": 4,
        "resources": {"disk": 1},
    }


def test_the_trunk_lies_on_the_first_node_that_is_alive_and_has_what_it_asks_for():
    ray = FakeRay(
        node("10.0.0.1", GPU=8),
        node("10.0.0.2", alive=False, GPU=8, disk=1),
        node("10.0.0.4", GPU=8, disk=1),
        node("10.0.0.3", GPU=8, disk=1),
    )
    assert choose_trunk(ray, GPUS) == "10.0.0.3"


def test_no_such_node_is_an_error_that_says_what_it_lacks():
    with pytest.raises(UserError, match="no node of the cluster has 1 disk, 4 GPU"):
        choose_trunk(FakeRay(node("10.0.0.1", GPU=8)), GPUS)


def test_the_node_of_a_run_is_known_by_its_keeper():
    ray = FakeRay(actors=("other@10.0.0.1", "small@10.0.0.2"))
    assert find_keeper(ray, "small") == "10.0.0.2"
    assert find_keeper(ray, "smaller") is None


def test_a_closed_port_is_said_at_once():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(UserError, match=f"nobody listens at 127.0.0.1:{port}"):
        connect(f"ray://127.0.0.1:{port}")


def test_a_malformed_address_is_named():
    with pytest.raises(UserError, match=r"placement\.address ray://host:port"):
        connect("ray://host:port")


def test_a_node_without_the_package_is_said_in_a_line():
    # given how Ray 2.60 tells of it
    told = RuntimeError(
        "The actor died because of an error raised in its creation task, ray::Keeper.__init__()\n"
        "RuntimeError: The actor with name Keeper failed to import on the worker.\n"
        "ModuleNotFoundError: No module named 'runspec'"
    )
    assert line_of(told).startswith("the package runspec-rl is not installed on that node: pip")
