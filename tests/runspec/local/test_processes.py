"""The processes of a run: command lines, cores, devices, addresses, and Prometheus's targets."""

from __future__ import annotations

import json
import os
import random
import socket
from collections.abc import Mapping
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from runspec.core.errors import UserError
from runspec.core.process import Endpoints, Role, address, load_endpoints, save_endpoints
from runspec.core.schema import RunSpec
from runspec.core.schema.role_names import DRAWN, WARM_START, placeable, role_names, server_names
from runspec.local.endpoints import fixed_endpoints, plan_endpoints, port_is_free
from runspec.local.fleet import RestartPolicy
from runspec.local.identity import Identity
from runspec.local.machine import (
    TPU_HOSTS,
    Machine,
    assign_cores,
    assign_devices,
    jax_environment,
    visible_devices,
)
from runspec.local.prepare import write_targets
from runspec.local.processes import (
    PreparedRun,
    RoleSpec,
    first_version_role,
    role_specs,
)
from runspec.local.site import site_spec
from runspec.role import STARTS
from tests.runspec.local.fake_run import island_run, small_spec
from tests.runspec.supervised import supervised_spec

HERE = "http://127.0.0.1"
ENDPOINTS = Endpoints(
    f"{HERE}:8000",
    f"{HERE}:8001",
    {"local": f"{HERE}:8002"},
    shares={name: f"{HERE}:{8100 + i}" for i, name in enumerate("abc")},
    islands={"island-b-0": f"{HERE}:8004"},
)
ROOT_KEY = "ab" * 32
TWO_HOSTS = "learner.hosts=2"
GPU = {"kind": "h100-80g", "count": 2}
GPUS = (
    "learner.hardware={kind: h100-80g, count: 2}",
    "verify={validators: 2, hardware: {kind: h100-80g, count: 2}}",
    "samplers.volunteers.hardware={kind: l4, count: 1}",
    "placement.roles=[validators, volunteers]",
)
NAMES = (
    *("origin", "relay-local", "coordinator", "publisher", "learner"),
    *("validator-0", "evaluator"),
)
TWO_OF_B = {"name": "b", "hosts": 2}


def run_of(
    spec: RunSpec, endpoints: Endpoints = ENDPOINTS, env: Mapping[str, str] | None = None
) -> PreparedRun:
    run_dir = Path("/runs") / spec.name
    identity, machine = Identity(run_dir / "keys", ROOT_KEY), Machine("python", (0, 1), env or {})
    if spec.learner.islands is None:
        endpoints = replace(endpoints, shares={}, islands={})
    return PreparedRun(spec, run_dir, endpoints, identity, machine, lock=-1)


def roles_of(spec: RunSpec, *run: Any) -> dict[str, RoleSpec]:
    return {role.name: role for role in role_specs(run_of(spec, *run))}


def started(spec: RunSpec, name: str, endpoints: Endpoints = ENDPOINTS) -> Role:
    """The role as its process finds it."""
    identity = spec.identity.model_copy(update={"root_public_key": ROOT_KEY})
    pinned = spec.model_copy(update={"identity": identity})
    return run_of(pinned, endpoints).role(name)


def test_the_laptop_profile_is_eight_processes() -> None:
    spec = small_spec("small", 5)
    roles = roles_of(spec)
    assert {name: " ".join(role.command) for name, role in roles.items()} == {
        name: f"python -m runspec.role {name} /runs/small" for name in (*NAMES, "volunteers-0")
    }
    # and learner and sampler have a core each, while the rest roam
    pinned = {name: role.cores for name, role in roles.items() if role.cores}
    assert pinned == {"learner": (0,), "volunteers-0": (1,)}
    assert roles["volunteers-0"].env["VLLM_CPU_OMP_THREADS_BIND"] == "1"
    # and servers listen, and stores and what is fetched have folders of their own
    listen = {name: role.listen for name, role in roles.items() if role.listen}
    assert listen == {
        name: ("127.0.0.1", 8000 + i)
        for i, name in enumerate(("coordinator", "origin", "relay-local"))
    }
    for name, at in listen.items():
        assert started(spec, name).address == at
    assert started(spec, "origin").store == Path("/runs/small/store/origin")
    assert started(spec, "volunteers-0").work == Path("/runs/small/work/volunteers-0")
    # and a worker knows its pool, and a volunteer's is called like it, and has the whole folder
    assert [started(spec, name).pool for name in ("volunteers-0", "volunteers")] == [
        "volunteers"
    ] * 2
    assert [started(spec, name).kind for name in ("volunteers-0", "volunteers")] == ["worker"] * 2
    assert started(spec, "volunteers").work == Path("/runs/small")
    assert started(spec, "volunteers").versions == Path("/runs/small/weights")
    # and all others share the versions that they fetch
    found = {started(spec, name).versions for name in ("volunteers-0", "validator-0")}
    assert found == {Path("/runs/small/work/weights")}
    # and version 0 is made by one process on the whole mesh
    first = first_version_role(run_of(small_spec("small", 5, TWO_HOSTS)))
    assert first.command[-2:] == ("warm-start", "/runs/small")
    assert first.policy.ends_run and "device_count=2" in first.env["XLA_FLAGS"]


@pytest.mark.parametrize(("hosts", "on_cpu"), [(1, False), (2, True)])
def test_one_host_makes_version_0_on_its_cpu_where_the_mesh_is_of_several(
    hosts: int, on_cpu: bool
) -> None:
    # given a learner with two GPUs, on one host or on two
    states = ("checkpoints.dir=s3://bucket/runs", f"learner.hosts={hosts}")
    spec = small_spec("small", 5, *GPUS, *states)
    first = first_version_role(run_of(spec))
    # then the devices are those of the mesh, and the host's own where it has them all
    assert ("device_count=2" in first.env.get("XLA_FLAGS", "")) == on_cpu
    assert (first.env.get("JAX_PLATFORMS") == "cpu") == on_cpu
    # and weights are drawn on one CPU device, whatever the learner has
    drawn = first_version_role(run_of(supervised_spec(learner={"hosts": hosts})))
    assert drawn.env["JAX_PLATFORMS"] == "cpu" and drawn.command[-2] == DRAWN


def test_every_role_can_be_started() -> None:
    small = small_spec("small", 5, "monitors=[{name: m, kind: tensorboard}]")
    kinds = set()
    for spec in (small, island_run()):
        for name in (*role_names(spec), WARM_START, DRAWN):
            kinds.add(kind := started(spec, name).kind)
            module, _, function = STARTS[kind].partition(":")
            assert callable(getattr(import_module(module), function))
    assert kinds == STARTS.keys()


def test_a_learner_of_two_hosts_is_two_processes_that_know_where_to_meet() -> None:
    at = replace(ENDPOINTS, learner=f"{HERE}:8003")
    spec = small_spec("small", 5, TWO_HOSTS)
    roles, both = roles_of(spec, at), ["learner", "learner-1"]
    for number, name in enumerate(both):
        assert started(spec, name, at).program() == (None, both, f"{HERE}:8003")
        # then each has one of the mesh's devices, and the first alone ends the run
        assert "device_count=1" in roles[name].env["XLA_FLAGS"]
        assert roles[name].policy == RestartPolicy(number == 0, number == 1)
    # and a host that a backend names gets its number, whatever its cluster calls it
    injected = {"TPU_WORKER_ID": "0", "TPU_WORKER_HOSTNAMES": "c"}
    for env, expected in (
        (injected, [(None, None)] * 2),
        (injected | {TPU_HOSTS: "a,b"}, [("0", "a,b"), ("1", "a,b")]),
    ):
        hosts = roles_of(small_spec("small", 5, TWO_HOSTS), at, env)
        own = [hosts[name].env for name in ("learner", "learner-1")]
        found = [(each.get("TPU_WORKER_ID"), each.get("TPU_WORKER_HOSTNAMES")) for each in own]
        assert found == expected


def test_weights_come_from_the_relays_in_turns_or_as_named_and_last_from_the_origin() -> None:
    origin, a, b, c = f"{HERE}:8001", f"{HERE}:1", f"{HERE}:2", "https://c.example.org"
    here = replace(ENDPOINTS, relays={"a": a, "b": b})
    chain = "broadcast.relays={a: {upstream: [origin]}, b: {upstream: [a, origin]}, local: null}"
    spec = small_spec("small", 5, "samplers.volunteers.replicas=2", chain)
    assert started(spec, "relay-b", here).upstreams() == [a, origin]
    assert started(spec, "volunteers-0", here).weights() == [a, b, origin]
    assert started(spec, "volunteers-1", here).weights() == [b, a, origin]
    # and a pool that names relays has those, one of them another machine's
    relays = "broadcast.relays={a: {}, b: {}, c: {url: https://c.example.org}, local: null}"
    placed = "placement.roles=[validators, relay-a, relay-b, volunteers]"
    spec = small_spec("small", 5, relays, "samplers.volunteers.relays=[c, a]", placed)
    here = replace(here, elsewhere={"c": c})
    assert started(spec, "volunteers-0", here).weights() == [c, a, origin]
    assert started(spec, "validator-0", here).weights() == [a, b, c, origin]
    # while a volunteer, who may have no relay's name, has all
    assert started(spec, "volunteers", here).weights() == [a, b, c, origin]
    roles = roles_of(spec, here)
    assert "relay-a" in roles and "relay-c" not in roles


def test_two_roles_of_one_name_are_refused() -> None:
    spec = small_spec("small", 5, "broadcast.relays={x-0: {upstream: [origin]}, local: null}")
    pool = spec.samplers[0].model_copy(update={"name": "relay-x"})
    spec = spec.model_copy(update={"samplers": [pool]})
    with pytest.raises(UserError, match="2 roles would be called relay-x-0"):
        roles_of(spec, replace(ENDPOINTS, relays={"x-0": f"{HERE}:1"}))


def test_a_machine_starts_the_trunk_and_what_placement_names() -> None:
    for roles, more in (("[]", []), ("[validators]", ["validator-0", "validator-1"])):
        found = roles_of(small_spec("small", 5, f"placement.roles={roles}", "verify.validators=2"))
        assert set(found) == {"origin", "coordinator", "publisher", "learner", *more}
        # and the learner need not leave a core to a sampler that is elsewhere
        assert found["learner"].cores == (0,)


def test_roles_of_one_machine_have_accelerators_of_their_own() -> None:
    by_hand = "placement.devices={validator-1: [0, 3]}"  # the others take what is left
    for overrides, devices in (
        (GPUS, ["0,1", "2,3", "4,5", "6"]),
        ((*GPUS, by_hand), ["1,2", "4,5", "0,3", "6"]),
    ):
        roles = roles_of(small_spec("small", 5, *overrides))
        seen = {name: role.env.get("CUDA_VISIBLE_DEVICES") for name, role in roles.items()}
        busy = ("learner", "validator-0", "validator-1", "volunteers-0")
        assert [seen.pop(name) for name in busy] == devices
        assert set(seen.values()) == {None}


def test_devices_are_named_in_the_words_of_their_driver() -> None:
    assert visible_devices("h100-80g", None) == {}
    assert visible_devices("h100-80g", []) == {"CUDA_VISIBLE_DEVICES": ""}
    assert visible_devices("rtx-4090", [2, 0]) == {"CUDA_VISIBLE_DEVICES": "2,0"}
    # three chips are no rectangle: libtpu has to say so itself
    assert visible_devices("tpu-v5e", [0, 1, 2]) == {"TPU_VISIBLE_CHIPS": "0,1,2"}
    for count, bounds in {1: "1,1,1", 2: "1,2,1", 4: "2,2,1", 8: "2,4,1"}.items():
        found = visible_devices("tpu-v5e", range(count))
        assert found["TPU_VISIBLE_CHIPS"] == ",".join(map(str, range(count)))
        assert found["TPU_CHIPS_PER_PROCESS_BOUNDS"] == bounds


def test_busy_roles_share_the_cores() -> None:
    # a second sampler shares with the first, and not with the learner
    assert assign_cores([*"lab"], [4, 5]) == {"l": (4,), "a": (5,), "b": (5,)}
    # islands share evenly
    assert assign_cores([*"lab"], [4, 5], evenly=True) == {"l": (4,), "a": (5,), "b": (4,)}
    # of many cores some are left for the rest
    assert assign_cores([*"lab"], range(8)) == {"l": (0, 1), "a": (2, 3), "b": (4, 5)}
    assert assign_cores([*"lab"], range(3), others=False) == {"l": (0,), "a": (1,), "b": (2,)}
    assert assign_cores([*"lab"], [0]) == {}


def test_jax_on_a_cpu_has_the_mesh_as_virtual_devices_and_keeps_flags() -> None:
    flags = "--xla_dump_to=/tmp/x --xla_cpu_multi_thread_eigen=false"
    for devices, threads in ((1, {}), (2, {"NPROC": "8"})):
        env = jax_environment({"XLA_FLAGS": "--xla_dump_to=/tmp/x"}, on_cpu=True, devices=devices)
        # then XLA has threads for several collectives at once
        assert env == threads | {
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": f"{flags} --xla_force_host_platform_device_count={devices}",
        }
    assert jax_environment({}, on_cpu=False, devices=64) == {}


def test_each_island_is_a_learner_and_a_server_of_its_shares() -> None:
    spec = island_run()
    roles = roles_of(spec)
    b = started(spec, "island-b")
    assert b.program() == ("b", ["island-b"], None)
    assert b.weights() == [f"{HERE}:8002", f"{HERE}:8001"]
    assert started(spec, "learner").program() == ("a", ["learner"], None)
    assert started(spec, "shares-b").store == Path("/runs/reads/store/shares-b")
    assert roles["shares-b"].listen == ("127.0.0.1", 8101)
    # and only the trunk's end the run, by success or by failure
    assert [name for name, role in roles.items() if role.policy.ends_run] == ["learner"]
    assert [name for name, role in roles.items() if role.policy.may_fail] == [
        "island-b",
        "shares-b",
    ]
    assert roles["island-b"].policy.ends_when_sampled
    # and an island of two hosts speaks through the first, each with its part of the devices
    many = {"mesh": {"fsdp": 4}, "hardware": {"kind": "cpu", "count": 4}}
    spec = island_run({"name": "a"}, TWO_OF_B | many, {"name": "c"})
    roles, both = roles_of(spec), ["island-b-0", "island-b-1"]
    for name in both:
        assert started(spec, name).program() == ("b", both, f"{HERE}:8004")
        assert "device_count=2" in roles[name].env["XLA_FLAGS"]
    servers = ["coordinator", "origin", "island-b-0", "shares-a", "shares-b", "shares-c"]
    assert server_names(spec) == servers
    assert placeable(spec)["island-b"] == ["island-b-0", "island-b-1", "shares-b"]
    # and one learner needs none of it
    assert started(supervised_spec(), "learner").program() == (None, ["learner"], None)


def test_islands_of_one_machine_have_accelerators_of_their_own() -> None:
    member = {"name": "b", "hardware": {**GPU, "count": 1}, "mesh": {"fsdp": 1}}
    islands = {"members": [{"name": "a"}, member, {"name": "c"}]}
    spec = supervised_spec(learner={"hardware": GPU, "islands": islands})
    assert assign_devices(spec, set(role_names(spec))) == {
        "learner": [0, 1],
        "island-b": [2],
        "island-c": [3, 4],
    }
    assert assign_devices(spec, {"island-c", "shares-c"}) == {}


def any_port(host: str, port: int) -> bool:
    return True


def plan(
    *overrides: str, previous: Endpoints | None = None, is_free: Any = port_is_free
) -> Endpoints:
    spec = small_spec("small", 5, *overrides)
    return plan_endpoints(spec, previous, is_free, random.Random(0))


MEASURED = ["publisher", "learner", "validator-0", "evaluator", "volunteers-0"]


def test_chosen_ports_are_free_and_distinct_and_kept_but_for_what_is_taken(tmp_path: Path) -> None:
    # given a run that asks for figures
    assert load_endpoints(tmp_path) is None
    before = plan("placement.metrics={}")
    assert list(before.metrics) == MEASURED and plan().metrics == {}
    urls = [*before.all().values(), *before.metrics.values()]
    assert len(set(urls)) == len(urls) == 8
    assert all(port_is_free(*address(url)) for url in urls)
    save_endpoints(tmp_path, before)
    assert load_endpoints(tmp_path) == before
    # when it is planned again, then it keeps them all, and moves only what is taken
    assert plan("placement.metrics={}", previous=before) == before
    gone = {address(before.origin)[1], address(before.metrics["learner"])[1]}
    after = plan(
        "placement.metrics={}", previous=before, is_free=lambda host, port: port not in gone
    )
    assert after.origin != before.origin
    assert after.metrics.pop("learner") != before.metrics.pop("learner")
    assert replace(after, origin=before.origin) == before
    # and another host gets new ones
    moved = plan("placement.metrics.host=127.0.0.2", previous=before)
    assert {address(url)[0] for url in moved.metrics.values()} == {"127.0.0.2"}


def test_a_fixed_port_that_is_taken_stops_a_server_but_no_figures() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = server.getsockname()[1]
        said = rf"port {taken} is taken by .*process {os.getpid()}"
        with pytest.raises(UserError, match=said):
            plan(f"placement.base_port={taken}")
        found = plan(f"placement.metrics.base_port={taken}")
    assert found.metrics["publisher"] == f"{HERE}:{taken}"
    # and the origin listens where the spec says
    origin = f"broadcast.origin.url={HERE}:9100"
    assert plan(origin, is_free=any_port).origin == f"{HERE}:9100"
    with pytest.raises(UserError, match=r"no free port found in 20000-31999"):
        plan(is_free=lambda host, port: False)


SERVERS = {"coordinator", "origin", "relay-local"}


def test_prometheus_finds_every_process_with_its_role(tmp_path: Path) -> None:
    def targets(*overrides: str) -> dict[str, dict[str, Any]]:
        fixed = ("placement.base_port=9000", "placement.metrics={base_port: 9100}")
        spec = small_spec("small", 5, *fixed, *overrides)
        write_targets(tmp_path, spec, plan_endpoints(spec, None, any_port, random.Random(0)))
        read = json.loads((tmp_path / "targets.json").read_text())
        return {each["labels"]["process"]: each for each in read}

    # given a run of all kinds of roles, with two hosts of the learner and two workers
    several = (TWO_HOSTS, "samplers.volunteers.replicas=2")
    found = targets(*several)
    # then all are there but the learner's second process, which has no figures
    assert found.keys() == set(role_names(small_spec("small", 5, *several))) - {"learner-1"}
    at = {name: each["targets"] for name, each in found.items()}
    assert (at["coordinator"], at["origin"]) == (["127.0.0.1:9000"], ["127.0.0.1:9001"])
    assert [at[name] for name in (*MEASURED, "volunteers-1")] == [
        [f"127.0.0.1:{9100 + i}"] for i in range(6)
    ]
    labels = {"run": "small", "role": "worker", "process": "volunteers-1", "pool": "volunteers"}
    assert found["volunteers-1"]["labels"] == labels
    # and of a cluster only the trunk and the servers are known here
    assert targets("placement.backend=ray").keys() == SERVERS | {"publisher", "learner"}
    # and a relay elsewhere, with its own scheme and path
    relays = "broadcast.relays={local: {url: https://relay.example.org/runs/}}"
    found = targets(relays, "placement.roles=[volunteers]")
    assert found.keys() == SERVERS | {"publisher", "learner", "volunteers-0"}
    assert found["relay-local"]["targets"] == ["relay.example.org"]
    labels = {"__scheme__": "https", "__metrics_path__": "/runs/metrics"}
    assert labels.items() < found["relay-local"]["labels"].items()
    # and a role of a site, under its machine's name
    spec = site_spec(small_spec("small", 5, "placement.metrics={host: 0.0.0.0}"), ROOT_KEY)
    write_targets(tmp_path, spec, fixed_endpoints(spec), ("validator-0",))
    [target] = json.loads((tmp_path / "targets.json").read_text())
    assert target["targets"] == [f"{socket.gethostname()}:29502"]
