"""The processes of a run: command lines, cores, devices, addresses, and Prometheus's targets."""

from __future__ import annotations

import json
import os
import random
import socket
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from runspec.core.errors import UserError
from runspec.core.spec.role_names import (
    elsewhere,
    placeable,
    rendezvous_names,
    role_names,
    server_names,
    trunk_names,
)
from runspec.core.spec.schema import RunSpec
from runspec.local.cores import assign_cores, assign_devices, jax_environment, visible_devices
from runspec.local.endpoints import (
    Endpoints,
    address,
    fixed_endpoints,
    fixed_metrics,
    load_endpoints,
    plan_endpoints,
    port_is_free,
    save_endpoints,
)
from runspec.local.identity import Identity
from runspec.local.machine import Machine
from runspec.local.processes import PreparedRun, RoleSpec, first_version_role, role_specs
from runspec.local.site import site_spec
from runspec.local.targets import write_targets
from tests.runspec.local.fake_run import island_run, small_spec
from tests.runspec.supervised import supervised_spec

HERE = "http://127.0.0.1"
ENDPOINTS = Endpoints(
    f"{HERE}:8000",
    f"{HERE}:8001",
    {"local": f"{HERE}:8002"},
    shares={name: f"{HERE}:{8100 + i}" for i, name in enumerate("abcd")},
    islands={"island-b-0": f"{HERE}:8004"},
)
ROOT_KEY = "ab" * 32
RELAYS = "broadcast.relays={a: {}, b: {}, c: {url: https://c.example.org}, local: null}"
THREE_RELAYS = replace(
    ENDPOINTS,
    relays={"a": f"{HERE}:1", "b": f"{HERE}:2"},
    elsewhere={"c": "https://c.example.org"},
)
TWO_HOSTS = "learner.hosts=2"
GPU = {"kind": "h100-80g", "count": 2}
GPUS = (
    "learner.hardware={kind: h100-80g, count: 2}",
    "verify={validators: 2, hardware: {kind: h100-80g, count: 2}}",
    "samplers.volunteers.hardware={kind: l4, count: 1}",
    "placement.roles=[validators, volunteers]",
)

SOME_BY_HAND = ("verify.validators=2", "placement.devices={learner: [0, 1], volunteers-0: [3]}")


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


def line(role: RoleSpec) -> str:
    return " ".join(role.command)


def test_the_laptop_profile_is_eight_processes() -> None:
    roles = roles_of(small_spec("small", 5, "broadcast.keep_versions=7"))
    served = f"--public-key {ROOT_KEY}"

    def work(name: str) -> str:
        return (
            f"--run small --coordinator {HERE}:8000 --weights {HERE}:8002 --weights {HERE}:8001 "
            f"{served} --key /runs/small/keys/{name}.key --dir /runs/small/work/{name}"
        )

    assert {name: line(role).removeprefix("python -m ") for name, role in roles.items()} == {
        "origin": "broadcast origin /runs/small/store/origin --listen 127.0.0.1:8001",
        "relay-local": f"broadcast relay --run small --upstream {HERE}:8001 --keep-versions 7 "
        f"--store /runs/small/store/relay-local {served} --listen 127.0.0.1:8002",
        "coordinator": f"verify coordinator /runs/small --public-weights {HERE}:8002 "
        f"--public-weights {HERE}:8001 --weights {HERE}:8001 {served} --listen 127.0.0.1:8000",
        "publisher": "bridge publish /runs/small",
        "learner": "learner_jax train /runs/small",
        "validator-0": f"verify validator {work('validator-0')}",
        "evaluator": f"sampler evaluate {work('evaluator')}",
        "volunteers-0": f"sampler work {work('volunteers-0')} --pool volunteers",
    }
    # and learner and sampler have a core each, while the rest roam
    pinned = {name: role.cores for name, role in roles.items() if role.cores}
    assert pinned == {"learner": (0,), "volunteers-0": (1,)}
    assert roles["volunteers-0"].env["VLLM_CPU_OMP_THREADS_BIND"] == "1"
    assert "device_count=2" in roles["learner"].env["XLA_FLAGS"]
    assert "device_count=1" in roles["validator-0"].env["XLA_FLAGS"]


def test_version_0_is_made_by_one_process_on_the_whole_mesh() -> None:
    for spec, command in (
        (small_spec("small", 5, TWO_HOSTS), "warm-start /runs/small --cache /cache"),
        (supervised_spec(), "draw /runs/reads"),
    ):
        role = first_version_role(run_of(spec), Path("/cache"))
        assert line(role) == f"python -m learner_jax {command}" and role.ends_run
        assert "device_count=2" in role.env["XLA_FLAGS"]


def test_a_monitor_is_a_process_of_the_trunk_that_may_fail() -> None:
    monitors = "monitors=[{name: curves, kind: tensorboard, deadline: 5s}]"
    spec = small_spec("small", 5, monitors, "placement.roles=[]")
    monitor = roles_of(spec)["monitor-curves"]
    assert line(monitor) == "python -m runspec monitor /runs/small curves"
    assert monitor.may_fail and monitor.late_s == 5.0 and not monitor.ends_run
    assert "monitor-curves" in trunk_names(spec) and "monitor-curves" not in placeable(spec)


def test_a_learner_of_two_hosts_is_two_processes_that_know_where_to_meet() -> None:
    at = replace(ENDPOINTS, learner=f"{HERE}:8003")
    roles = roles_of(small_spec("small", 5, TWO_HOSTS), at)
    for number, name in enumerate(("learner", "learner-1")):
        assert line(roles[name]).endswith(
            f"train /runs/small --coordinator 127.0.0.1:8003 --process {number} --heartbeat 10"
        )
        # then each has one of the mesh's devices, and the first alone ends the run
        assert "device_count=1" in roles[name].env["XLA_FLAGS"]
        assert (roles[name].ends_run, roles[name].ends_when_sampled) == (number == 0, number == 1)
    # and a host that a backend names gets its number
    names = {"TPU_WORKER_HOSTNAMES": "a,b"}
    for env, ids in (
        ({}, [None] * 2),
        (names, ["0", "1"]),
        (names | {"TPU_WORKER_ID": "7"}, [None] * 2),
    ):
        hosts = roles_of(small_spec("small", 5, TWO_HOSTS), at, env)
        assert [hosts[name].env.get("TPU_WORKER_ID") for name in ("learner", "learner-1")] == ids


def test_roles_that_are_no_servers_are_told_where_their_figures_are_served() -> None:
    spec = small_spec("small", 5, TWO_HOSTS, "placement.metrics={}")
    at = {"publisher": "0.0.0.0:9100", "learner": "[::1]:9101", "volunteers-0": "127.0.0.1:9104"}
    metrics = {name: f"http://{each}" for name, each in at.items()}
    roles = roles_of(spec, replace(ENDPOINTS, learner=f"{HERE}:8003", metrics=metrics))
    told = {name: line(role).partition(" --metrics ")[2] for name, role in roles.items()}
    assert {name: text for name, text in told.items() if text} == at | {"learner": "::1:9101"}


def test_weights_come_from_the_relays_in_turns_or_as_named_and_last_from_the_origin() -> None:
    origin = f"--weights {HERE}:8001"
    a, b, c = f"--weights {HERE}:1", f"--weights {HERE}:2", "--weights https://c.example.org"
    chain = "broadcast.relays={a: {upstream: [origin]}, b: {upstream: [a, origin]}, local: null}"
    spec = small_spec("small", 5, "samplers.volunteers.replicas=2", chain)
    roles = roles_of(spec, replace(THREE_RELAYS, elsewhere={}))
    assert f"--upstream {HERE}:1 --upstream {HERE}:8001" in line(roles["relay-b"])
    assert f"{a} {b} {origin}" in line(roles["volunteers-0"])
    assert f"{b} {a} {origin}" in line(roles["volunteers-1"])
    # and a pool that names relays has those, one of them another machine's
    here = "placement.roles=[validators, relay-a, relay-b, volunteers]"
    spec = small_spec("small", 5, RELAYS, "samplers.volunteers={relays: [c, a], replicas: 2}", here)
    roles = roles_of(spec, THREE_RELAYS)
    for name in ("volunteers-0", "volunteers-1"):
        assert f"{c} {a} {origin}" in line(roles[name])
    assert f"{a} {b} {c} {origin}" in line(roles["validator-0"])
    assert "relay-a" in roles and "relay-c" not in roles


def test_secrets_reach_the_roles_under_their_names_and_no_command_line() -> None:
    spec = small_spec("small", 5, "secrets=[{name: HF_TOKEN, from: {env: MY_TOKEN}}]")
    for role in roles_of(spec, ENDPOINTS, {"MY_TOKEN": "hush"}).values():
        assert role.env["HF_TOKEN"] == "hush" and "hush" not in line(role)


def test_two_roles_of_one_name_are_refused() -> None:
    spec = small_spec("small", 5, "broadcast.relays={x-0: {upstream: [origin]}, local: null}")
    pool = spec.samplers[0].model_copy(update={"name": "relay-x"})
    spec = spec.model_copy(update={"samplers": [pool]})
    with pytest.raises(UserError, match="2 roles would be called relay-x-0"):
        roles_of(spec, replace(ENDPOINTS, relays={"x-0": f"{HERE}:1"}))


@pytest.mark.parametrize(
    ("roles", "more"),
    [
        ("[]", set()),
        ("[validators]", {"validator-0", "validator-1"}),
        ("[volunteers]", {"volunteers-0"}),
    ],
)
def test_a_machine_starts_the_trunk_and_what_placement_names(roles: str, more: set[str]) -> None:
    found = roles_of(small_spec("small", 5, f"placement.roles={roles}", "verify.validators=2"))
    assert set(found) == {"origin", "coordinator", "publisher", "learner"} | more
    # and the learner need not leave a core to a sampler that is elsewhere
    assert found["learner"].cores == (0,)


@pytest.mark.parametrize(
    ("overrides", "devices"),
    [
        (GPUS, ["0,1", "2,3", "4,5", "6"]),
        # by hand, the others take what is left
        ((*GPUS, "placement.devices={validator-1: [0, 3]}"), ["1,2", "4,5", "0,3", "6"]),
        (SOME_BY_HAND, ["0,1", None, None, "3"]),
    ],
)
def test_roles_of_one_machine_have_accelerators_of_their_own(
    overrides: tuple[str, ...], devices: list[str | None]
) -> None:
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
        assert visible_devices("tpu-v5e", range(count)) == {
            "TPU_VISIBLE_CHIPS": ",".join(map(str, range(count))),
            "TPU_PROCESS_BOUNDS": "1,1,1",
            "TPU_CHIPS_PER_PROCESS_BOUNDS": bounds,
        }


@pytest.mark.parametrize(
    ("busy", "cores", "options", "assigned"),
    [
        # a second sampler shares with the first, and not with the learner
        ("lab", [4, 5], {}, {"l": (4,), "a": (5,), "b": (5,)}),
        # islands share evenly
        ("lab", [4, 5], {"evenly": True}, {"l": (4,), "a": (5,), "b": (4,)}),
        # of many cores some are left for the rest
        ("lab", range(8), {}, {"l": (0, 1), "a": (2, 3), "b": (4, 5)}),
        ("lab", range(3), {"others": False}, {"l": (0,), "a": (1,), "b": (2,)}),
        ("lab", [0], {}, {}),
    ],
)
def test_busy_roles_share_the_cores(busy: str, cores: Any, options: Any, assigned: Any) -> None:
    assert assign_cores([*busy], cores, **options) == assigned


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


TWO_OF_B = {"name": "b", "hosts": 2}


def test_names_of_processes_groups_and_servers_of_islands() -> None:
    spec = island_run({"name": "a"}, TWO_OF_B, {"name": "c"})
    assert role_names(spec) == [
        *("origin", "coordinator", "publisher", "learner"),
        *("island-b-0", "island-b-1", "island-c", "shares-a", "shares-b", "shares-c"),
    ]
    shares = ["shares-a", "shares-b", "shares-c"]
    assert server_names(spec) == ["coordinator", "origin", "island-b-0", *shares]
    assert rendezvous_names(spec) == ["island-b-0"]
    assert trunk_names(spec)[-1] == "shares-a"
    assert placeable(spec)["island-b"] == ["island-b-0", "island-b-1", "shares-b"]
    assert elsewhere(island_run(roles=[])) == {"island-b", "shares-b"}


def test_each_island_is_a_learner_and_a_server_of_its_shares() -> None:
    roles = roles_of(island_run())

    def speaking(name: str, port: int) -> str:
        return (
            f"--island {name} --coordinator-url {HERE}:8000 --key "
            f"/runs/reads/keys/island-{name}.key --share-url {HERE}:{port} "
            f"--share-store /runs/reads/store/shares-{name}"
        )

    train = "python -m learner_jax train /runs/reads"
    assert line(roles["learner"]) == f"{train} {speaking('a', 8100)}"
    assert line(roles["island-b"]) == (
        f"{train}/work/island-b {speaking('b', 8101)} "
        f"--weights {HERE}:8002 --weights {HERE}:8001 --public-key {ROOT_KEY}"
    )
    for name, port in (("a", 8100), ("b", 8101)):
        store = f"/runs/reads/store/shares-{name} --listen 127.0.0.1:{port}"
        assert line(roles[f"shares-{name}"]) == f"python -m broadcast origin {store}"
    # and only the trunk's end the run, by success or by failure
    assert [name for name, role in roles.items() if role.ends_run] == ["learner"]
    assert [name for name, role in roles.items() if role.may_fail] == ["island-b", "shares-b"]
    assert roles["island-b"].ends_when_sampled
    # and islands share the cores evenly; one learner needs none of it
    roles = roles_of(island_run(*({"name": name} for name in "abcd")))
    names = ("learner", "island-b", "island-c", "island-d", "shares-a")
    assert [roles[name].cores for name in names] == [(0,), (1,), (0,), (1,), ()]
    assert line(roles_of(supervised_spec())["learner"]) == train


def test_an_island_of_two_hosts_speaks_through_the_first() -> None:
    many = {"mesh": {"fsdp": 4}, "hardware": {"kind": "cpu", "count": 4}}
    roles = roles_of(island_run({"name": "a"}, TWO_OF_B | many))
    first, second = roles["island-b-0"], roles["island-b-1"]
    meet = "/runs/reads/work/island-b --coordinator 127.0.0.1:8004 --process"
    assert f"train {meet} 0" in line(first) and "--key" in line(first)
    assert line(second).endswith(f"train {meet} 1 --heartbeat 10 --island b")
    # and each has its part of the island's devices, not of the learner's
    assert all("device_count=2" in role.env["XLA_FLAGS"] for role in (first, second))


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


@pytest.fixture
def taken() -> Iterator[int]:
    """A port that this process listens on."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


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


def test_a_fixed_port_that_is_taken_stops_a_server_but_no_figures(taken: int) -> None:
    with pytest.raises(UserError, match=rf"port {taken} is taken by .*process {os.getpid()}") as no:
        plan(f"placement.base_port={taken}")
    assert no.value.place == f"coordinator at 127.0.0.1:{taken}"
    found = plan(f"placement.metrics.base_port={taken}")
    assert found.metrics["publisher"] == f"{HERE}:{taken}"
    # and the origin listens where the spec says
    origin = f"broadcast.origin.url={HERE}:9100"
    assert plan(origin, is_free=any_port).origin == f"{HERE}:9100"
    with pytest.raises(UserError, match="port 9100 is taken"):
        plan(origin, is_free=lambda host, port: port != 9100)
    with pytest.raises(UserError, match=r"no free port found in 20000-31999"):
        plan(is_free=lambda host, port: False)


def test_a_relay_of_another_machine_is_known_by_its_url_and_no_port_is_taken(
    tmp_path: Path,
) -> None:
    relays = "broadcast.relays={local: {url: https://relay.example.org/}}"
    endpoints = plan(relays, "placement.roles=[validators, volunteers]")
    assert endpoints.elsewhere == {"local": "https://relay.example.org"}
    assert set(endpoints.all()) == {"coordinator", "origin"}
    save_endpoints(tmp_path, endpoints)
    assert load_endpoints(tmp_path) == endpoints


def test_on_kubernetes_all_but_the_trunks_have_one_port() -> None:
    cluster = "placement={backend: kubernetes, kubernetes: {image: i}}"
    spec = small_spec("small", 5, "placement.metrics={base_port: 9100}", cluster)
    ports = {name: address(url)[1] for name, url in fixed_metrics(spec).items()}
    assert ports == dict(zip(MEASURED, [9100, 9101, 9100, 9100, 9100], strict=True))


def test_servers_of_shares_have_ports_and_public_addresses() -> None:
    proxied = {"name": "b", "url": "https://b.example.org/"}
    spec = island_run({"name": "a"}, proxied, {"name": "c", "url": f"{HERE}:9100"})
    found = plan_endpoints(spec, None, any_port, random.Random(0))
    assert set(found.shares) == {"a", "b", "c"} and found.shares["b"].startswith(f"{HERE}:")
    assert [found.shares_url(name) for name in "abc"] == [
        *(found.shares["a"], "https://b.example.org", f"{HERE}:9100")
    ]
    # and of an island elsewhere nothing listens here
    away = spec.model_copy(update={"placement": spec.placement.model_copy(update={"roles": []})})
    assert set(plan_endpoints(away, None, any_port, random.Random(0)).shares) == {"a"}


FIXED = ("placement.base_port=9000", "placement.metrics={base_port: 9100}")
SERVERS = {"coordinator", "origin", "relay-local"}


def targets(folder: Path, *overrides: str) -> dict[str, dict[str, Any]]:
    """By process."""
    spec = small_spec("small", 5, *overrides)
    write_targets(folder, spec, plan_endpoints(spec, None, any_port, random.Random(0)))
    read = json.loads((folder / "targets.json").read_text())
    assert all(len(each["targets"]) == 1 for each in read)
    return {each["labels"]["process"]: each for each in read}


def test_prometheus_finds_every_process_with_its_role(tmp_path: Path) -> None:
    # given a run of all kinds of roles, with two hosts of the learner and two workers
    several = (TWO_HOSTS, "samplers.volunteers.replicas=2")
    found = targets(tmp_path, *FIXED, *several)
    # then all are there but the learner's second process, which has no figures
    assert found.keys() == set(role_names(small_spec("small", 5, *several))) - {"learner-1"}
    at = {name: each["targets"][0] for name, each in found.items()}
    assert (at["coordinator"], at["origin"]) == ("127.0.0.1:9000", "127.0.0.1:9001")
    assert [at[name] for name in (*MEASURED, "volunteers-1")] == [
        f"127.0.0.1:{9100 + i}" for i in range(6)
    ]
    labels = {"run": "small", "role": "worker", "process": "volunteers-1", "pool": "volunteers"}
    assert found["volunteers-1"]["labels"] == labels
    assert found["relay-local"]["labels"]["role"] == "relay"


def test_targets_are_those_that_are_known_here(tmp_path: Path) -> None:
    assert targets(tmp_path).keys() == SERVERS
    # of a cluster only the trunk and the servers
    cluster = targets(tmp_path, *FIXED, "placement.backend=ray")
    assert cluster.keys() == SERVERS | {"publisher", "learner"}
    # and a relay elsewhere, with its own scheme and path
    relays = "broadcast.relays={local: {url: https://relay.example.org/runs/}}"
    found = targets(tmp_path, *FIXED, relays, "placement.roles=[volunteers]")
    assert found.keys() == SERVERS | {"publisher", "learner", "volunteers-0"}
    assert found["relay-local"]["targets"] == ["relay.example.org"]
    labels = {"__scheme__": "https", "__metrics_path__": "/runs/metrics"}
    assert labels.items() < found["relay-local"]["labels"].items()
    # and a role of a site, under its machine's name
    spec = site_spec(small_spec("small", 5, "placement.metrics={host: 0.0.0.0}"), ROOT_KEY)
    write_targets(tmp_path, spec, fixed_endpoints(spec), ("validator-0",))
    [target] = json.loads((tmp_path / "targets.json").read_text())
    assert target["targets"] == [f"{socket.gethostname()}:29502"]
