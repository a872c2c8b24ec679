"""The command lines of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from runspec.core.errors import UserError
from runspec.core.spec.role_names import placeable, trunk_names
from runspec.core.spec.schema import RunSpec
from runspec.local.endpoints import Endpoints
from runspec.local.identity import Identity
from runspec.local.machine import Machine
from runspec.local.processes import PreparedRun, RoleSpec, role_specs
from tests.runspec.local.fake_run import small_spec

RUN = Path("/runs/small")
ENDPOINTS = Endpoints(
    "http://127.0.0.1:8000", "http://127.0.0.1:8001", {"local": "http://127.0.0.1:8002"}
)
ROOT_KEY = "ab" * 32


def roles_of(
    spec: RunSpec, endpoints: Endpoints = ENDPOINTS, env: Mapping[str, str] | None = None
) -> dict[str, RoleSpec]:
    identity = Identity(RUN / "keys", ROOT_KEY)
    machine = Machine("python", (0, 1), env or {})
    run = PreparedRun(spec, RUN, endpoints, identity, machine, lock=-1)
    return {role.name: role for role in role_specs(run)}


def line(role: RoleSpec) -> str:
    return " ".join(role.command)


def test_the_laptop_profile_is_eight_processes() -> None:
    roles = roles_of(small_spec("small", 5, "broadcast.keep_versions=7"))
    served = f"--public-key {ROOT_KEY}"
    weights = "--weights http://127.0.0.1:8002 --weights http://127.0.0.1:8001"
    assert {name: line(role) for name, role in roles.items()} == {
        "origin": "python -m broadcast origin /runs/small/store/origin --listen 127.0.0.1:8001",
        "relay-local": "python -m broadcast relay --run small --upstream http://127.0.0.1:8001 "
        f"--keep-versions 7 --store /runs/small/store/relay-local {served} --listen 127.0.0.1:8002",
        "coordinator": "python -m verify coordinator /runs/small "
        "--public-weights http://127.0.0.1:8002 --public-weights http://127.0.0.1:8001 "
        f"--weights http://127.0.0.1:8001 {served} --listen 127.0.0.1:8000",
        "publisher": "python -m bridge publish /runs/small",
        "learner": "python -m learner_jax train /runs/small",
        "validator-0": "python -m verify validator --run small "
        f"--coordinator http://127.0.0.1:8000 {weights} {served} "
        "--key /runs/small/keys/validator-0.key --dir /runs/small/work/validator-0",
        "evaluator": "python -m sampler evaluate --run small "
        f"--coordinator http://127.0.0.1:8000 {weights} {served} "
        "--key /runs/small/keys/evaluator.key --dir /runs/small/work/evaluator",
        "volunteers-0": "python -m sampler work --run small "
        f"--coordinator http://127.0.0.1:8000 {weights} {served} "
        "--key /runs/small/keys/volunteers-0.key --dir /runs/small/work/volunteers-0 "
        "--pool volunteers",
    }


def test_a_monitor_is_a_process_of_the_trunk_that_may_fail() -> None:
    # given a run of which this machine starts only what it must
    monitors = "monitors=[{name: curves, kind: tensorboard, deadline: 5s}]"
    spec = small_spec("small", 5, monitors, "placement.roles=[]")
    [monitor] = [role for role in roles_of(spec).values() if role.name == "monitor-curves"]
    assert line(monitor) == "python -m runspec monitor /runs/small curves"
    assert monitor.may_fail and monitor.late_s == 5.0 and not monitor.ends_run
    assert "monitor-curves" in trunk_names(spec)
    assert "monitor-curves" not in placeable(spec)


def test_a_learner_of_two_hosts_is_two_processes_that_know_where_to_meet() -> None:
    # given a mesh of two devices over two processes
    at = replace(ENDPOINTS, learner="http://127.0.0.1:8003")
    # when the roles are made
    roles = roles_of(small_spec("small", 5, "learner.hosts=2"), at)
    # then each has its number and one device, and the first alone ends the run
    for number, name in enumerate(("learner", "learner-1")):
        assert line(roles[name]) == (
            "python -m learner_jax train /runs/small --coordinator 127.0.0.1:8003 "
            f"--process {number} --heartbeat 10"
        )
        assert "device_count=1" in roles[name].env["XLA_FLAGS"]
        assert roles[name].ends_run == (number == 0)
        assert roles[name].ends_when_sampled == (number == 1)


def test_roles_that_are_no_servers_are_told_where_their_figures_are_served() -> None:
    spec = small_spec("small", 5, "learner.hosts=2", "placement.metrics={}")
    at = {"publisher": "http://0.0.0.0:9100", "learner": "http://[::1]:9101"}
    at |= {"validator-0": "http://127.0.0.1:9102", "evaluator": "http://127.0.0.1:9103"}
    at |= {"volunteers-0": "http://127.0.0.1:9104"}
    meet = "http://127.0.0.1:8003"
    roles = roles_of(spec, replace(ENDPOINTS, learner=meet, metrics=at))
    told = {name: line(role).partition(" --metrics ")[2] for name, role in roles.items()}
    assert told["publisher"] == "0.0.0.0:9100"
    assert told["learner"] == "::1:9101"
    assert [told[name] for name in ("validator-0", "evaluator")] == [
        "127.0.0.1:9102",
        "127.0.0.1:9103",
    ]
    assert told["volunteers-0"] == "127.0.0.1:9104"
    # and nobody else, as a learner's further processes
    assert not any(told[name] for name in told.keys() - at.keys())


def test_learner_and_sampler_have_a_core_each_and_the_rest_roam() -> None:
    roles = roles_of(small_spec())
    pinned = {name: role.cores for name, role in roles.items() if role.cores}
    assert pinned == {"learner": (0,), "volunteers-0": (1,)}
    assert roles["volunteers-0"].env["VLLM_CPU_OMP_THREADS_BIND"] == "1"
    assert "device_count=2" in roles["learner"].env["XLA_FLAGS"]
    assert "device_count=1" in roles["validator-0"].env["XLA_FLAGS"]


def test_workers_take_turns_at_the_relays_and_fall_back_to_the_origin() -> None:
    relays = "broadcast.relays={a: {upstream: [origin]}, b: {upstream: [a, origin]}, local: null}"
    spec = small_spec("small", 5, "samplers.volunteers.replicas=2", relays)
    at = {"a": "http://127.0.0.1:1", "b": "http://127.0.0.1:2"}
    roles = roles_of(spec, Endpoints("http://127.0.0.1:8000", "http://127.0.0.1:8001", at))
    upstream = "--upstream http://127.0.0.1:1 --upstream http://127.0.0.1:8001"
    assert upstream in line(roles["relay-b"])
    origin = "--weights http://127.0.0.1:8001"
    first = f"--weights http://127.0.0.1:1 --weights http://127.0.0.1:2 {origin}"
    second = f"--weights http://127.0.0.1:2 --weights http://127.0.0.1:1 {origin}"
    assert first in line(roles["volunteers-0"])
    assert second in line(roles["volunteers-1"])


def test_secrets_reach_the_roles_under_their_names_and_no_command_line() -> None:
    spec = small_spec("small", 5, "secrets=[{name: HF_TOKEN, from: {env: MY_TOKEN}}]")
    for role in roles_of(spec, env={"MY_TOKEN": "hush"}).values():
        assert role.env["HF_TOKEN"] == "hush"
        assert "hush" not in line(role)


def test_two_roles_of_one_name_are_refused() -> None:
    relay = "broadcast.relays={x-0: {upstream: [origin]}, local: null}"
    spec = small_spec("small", 5, relay)
    pool = spec.samplers[0].model_copy(update={"name": "relay-x"})
    spec = spec.model_copy(update={"samplers": [pool]})
    at = {"x-0": "http://127.0.0.1:1"}
    with pytest.raises(UserError, match="2 roles would be called relay-x-0"):
        roles_of(spec, Endpoints("http://127.0.0.1:8000", "http://127.0.0.1:8001", at))


THREE_RELAYS = "broadcast.relays={a: {}, b: {}, c: {url: https://c.example.org}, local: null}"


def three_relays(*overrides: str) -> tuple[RunSpec, Endpoints]:
    """A run with relays a and b at ports 1 and 2 of this machine, and what `overrides` say."""
    spec = small_spec("small", 5, THREE_RELAYS, *overrides)
    here = {"a": "http://127.0.0.1:1", "b": "http://127.0.0.1:2"}
    away = {"c": "https://c.example.org"}
    return spec, replace(ENDPOINTS, relays=here, elsewhere=away)


def test_a_pool_fetches_from_the_relays_that_it_names_and_last_from_the_origin() -> None:
    # given a pool of two that names two relays, one of them another machine's
    roles = "placement.roles=[validators, relay-a, relay-b, volunteers]"
    spec, at = three_relays("samplers.volunteers={relays: [c, a], replicas: 2}", roles)
    found = roles_of(spec, at)
    # then all its workers have them in that order, and the relay elsewhere is not started here
    named = "--weights https://c.example.org --weights http://127.0.0.1:1 --weights http://127.0"
    assert named in line(found["volunteers-0"]) and named in line(found["volunteers-1"])
    assert "relay-a" in found and "relay-c" not in found
    # and whoever names none takes its turn at all of them
    assert "--weights http://127.0.0.1:1 --weights http://127.0.0.1:2 --weights https://c" in line(
        found["validator-0"]
    )


def test_a_machine_starts_the_trunk_and_the_roles_that_placement_names() -> None:
    trunk = {"origin", "coordinator", "publisher", "learner"}
    assert set(roles_of(small_spec("small", 5, "placement.roles=[]"))) == trunk
    validators = small_spec("small", 5, "placement.roles=[validators]", "verify.validators=2")
    assert set(roles_of(validators)) == trunk | {"validator-0", "validator-1"}
    pool = small_spec("small", 5, "placement.roles=[volunteers]")
    assert set(roles_of(pool)) == trunk | {"volunteers-0"}
    # and the learner need not leave a core to a sampler that is elsewhere
    assert roles_of(small_spec("small", 5, "placement.roles=[]"))["learner"].cores == (0,)


def test_roles_of_one_machine_have_accelerators_of_their_own() -> None:
    # given a learner, validators and a worker on the GPUs of one machine
    gpus = (
        "learner.hardware={kind: h100-80g, count: 2}",
        "verify={validators: 2, hardware: {kind: h100-80g, count: 2}}",
        "samplers.volunteers.hardware={kind: l4, count: 1}",
        "placement.roles=[validators, volunteers]",
    )
    seen = {
        name: role.env.get("CUDA_VISIBLE_DEVICES")
        for name, role in roles_of(small_spec("small", 5, *gpus)).items()
    }
    busy = ("learner", "validator-0", "validator-1", "volunteers-0")
    assert [seen.pop(name) for name in busy] == ["0,1", "2,3", "4,5", "6"]
    assert set(seen.values()) == {None}
    # when some are given by hand, then the others take what is left
    named = roles_of(small_spec("small", 5, *gpus, "placement.devices={validator-1: [0, 3]}"))
    assert [named[name].env["CUDA_VISIBLE_DEVICES"] for name in busy] == ["1,2", "4,5", "0,3", "6"]


def test_a_role_sees_the_devices_that_placement_gives_it() -> None:
    # given two roles with devices of their own, on GPUs and on a TPU
    gpus = small_spec("small", 5, "placement.devices={learner: [0, 1], volunteers-0: [3]}")
    gpu = roles_of(gpus)
    tpu = roles_of(
        gpus.model_copy(
            update={
                "learner": gpus.learner.model_copy(
                    update={
                        "hardware": gpus.learner.hardware.model_copy(update={"kind": "tpu-v5p"})
                    }
                )
            }
        )
    )
    # then each sees its own
    assert gpu["learner"].env["CUDA_VISIBLE_DEVICES"] == "0,1"
    assert gpu["volunteers-0"].env["CUDA_VISIBLE_DEVICES"] == "3"
    assert tpu["learner"].env["TPU_VISIBLE_CHIPS"] == "0,1"
    assert tpu["learner"].env["TPU_CHIPS_PER_PROCESS_BOUNDS"] == "1,2,1"
    assert "CUDA_VISIBLE_DEVICES" not in tpu["learner"].env
    # and the others all
    assert "CUDA_VISIBLE_DEVICES" not in gpu["validator-0"].env


def test_a_learner_host_that_a_backend_names_gets_its_number() -> None:
    spec, joined = small_spec("small", 5, "learner.hosts=2"), "http://127.0.0.1:8009"
    endpoints = replace(ENDPOINTS, learner=joined)
    for env, ids in (
        ({}, [None, None]),
        ({"TPU_WORKER_HOSTNAMES": "a,b"}, ["0", "1"]),
        ({"TPU_WORKER_HOSTNAMES": "a,b", "TPU_WORKER_ID": "7"}, [None, None]),
    ):
        roles = roles_of(spec, endpoints, env)
        found = [roles[name].env.get("TPU_WORKER_ID") for name in ("learner", "learner-1")]
        assert found == ids
