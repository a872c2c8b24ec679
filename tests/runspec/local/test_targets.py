"""targets.json: every process of a run where Prometheus finds it."""

from __future__ import annotations

import json
import random
import socket
from pathlib import Path
from typing import Any

from runspec.core.spec.role_names import role_names
from runspec.core.spec.schema import RunSpec
from runspec.local.endpoints import fixed_endpoints, plan_endpoints
from runspec.local.site import site_spec
from runspec.local.targets import write_targets
from tests.runspec.local.fake_run import small_spec

FIXED = ("placement.base_port=9000", "placement.metrics={base_port: 9100}")


def targets(folder: Path, spec: RunSpec) -> dict[str, dict[str, Any]]:
    """By process."""
    endpoints = plan_endpoints(spec, None, lambda host, port: True, random.Random(0))
    write_targets(folder, spec, endpoints)
    read = json.loads((folder / "targets.json").read_text())
    assert all(len(each["targets"]) == 1 for each in read)
    return {each["labels"]["process"]: each for each in read}


def test_every_process_has_one_with_its_role(tmp_path: Path) -> None:
    # given a run of all kinds of roles, with two hosts of the learner and two workers
    spec = small_spec("small", 5, *FIXED, "learner.hosts=2", "samplers.volunteers.replicas=2")
    found = targets(tmp_path, spec)
    # then all are there but the learner's second process, which has no figures
    assert found.keys() == set(role_names(spec)) - {"learner-1"}
    at = {name: each["targets"][0] for name, each in found.items()}
    assert (at["coordinator"], at["origin"]) == ("127.0.0.1:9000", "127.0.0.1:9001")
    ordered = ["publisher", "learner", "validator-0", "evaluator", "volunteers-0", "volunteers-1"]
    assert [at[name] for name in ordered] == [f"127.0.0.1:{9100 + i}" for i in range(6)]
    labels = {"run": "small", "role": "worker", "process": "volunteers-1", "pool": "volunteers"}
    assert found["volunteers-1"]["labels"] == labels
    assert found["relay-local"]["labels"]["role"] == "relay"


def test_without_metrics_only_the_servers_are_there(tmp_path: Path) -> None:
    found = targets(tmp_path, small_spec("small", 5))
    assert found.keys() == {"coordinator", "origin", "relay-local"}


def test_a_relay_elsewhere_has_its_own_scheme_and_path(tmp_path: Path) -> None:
    relays = "broadcast.relays={local: {url: https://relay.example.org/runs/}}"
    roles = "placement.roles=[volunteers]"
    found = targets(tmp_path, small_spec("small", 5, *FIXED, relays, roles))
    assert found.keys() == {
        *("coordinator", "origin", "relay-local"),
        *("publisher", "learner", "volunteers-0"),
    }
    relay = found["relay-local"]
    assert relay["targets"] == ["relay.example.org"]
    assert relay["labels"]["__scheme__"] == "https"
    assert relay["labels"]["__metrics_path__"] == "/runs/metrics"


def test_of_a_cluster_only_the_trunk_and_servers_are_known(tmp_path: Path) -> None:
    found = targets(tmp_path, small_spec("small", 5, *FIXED, "placement.backend=ray"))
    servers = {"coordinator", "origin", "relay-local"}
    assert found.keys() == servers | {"publisher", "learner"}


def test_a_role_of_a_site_is_found_under_its_machines_name(tmp_path: Path) -> None:
    spec = small_spec("small", 5, "placement.metrics={host: 0.0.0.0}")
    spec = site_spec(spec, "ab" * 32)
    write_targets(tmp_path, spec, fixed_endpoints(spec), ("validator-0",))
    [target] = json.loads((tmp_path / "targets.json").read_text())
    assert target["targets"] == [f"{socket.gethostname()}:29502"]
