"""Processes, keys, bundles and rules of a run with islands."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from pathlib import Path, PurePath
from random import Random

import pytest

from runspec.core.errors import UserError
from runspec.core.keys import SigningKey
from runspec.core.process import EXIT_FINAL
from runspec.core.roles import open_roles, sign_roles
from runspec.core.spec.resolved import load_resolved
from runspec.core.spec.role_names import (
    elsewhere,
    placeable,
    rendezvous_names,
    role_names,
    server_names,
    trunk_names,
)
from runspec.core.spec.schema import RunSpec
from runspec.local.bundle import Bundle, decode_bundle, install, make_bundles
from runspec.local.cores import assign_cores, assign_devices
from runspec.local.endpoints import Endpoints, fixed_endpoints, plan_endpoints
from runspec.local.fleet import Fleet, Outcome, RoleState, Rules, State
from runspec.local.identity import Identity, make_identity
from runspec.local.machine import Machine
from runspec.local.processes import PreparedRun, RoleSpec, role_specs
from runspec.local.run_dir import write_spec
from runspec.local.site import BASE_PORT, Disk, Restart, groups_of, site_spec
from tests.runspec.supervised import supervised_spec

RUN = Path("/runs/reads")
ROOT_KEY = "ab" * 32
HERE = "http://127.0.0.1"
ENDPOINTS = Endpoints(
    f"{HERE}:8000",
    f"{HERE}:8001",
    {},
    shares={"a": f"{HERE}:8002", "b": f"{HERE}:8003"},
    islands={"island-b-0": f"{HERE}:8004"},
)
CPU = {"kind": "cpu", "count": 2}
GPU = {"kind": "h100-80g", "count": 2}


def island_run(*members: dict[str, object], **placement: object) -> RunSpec:
    members = members or ({"name": "a"}, {"name": "b"})
    learner = {"islands": {"members": list(members)}}
    return supervised_spec(learner=learner, placement=placement)


def roles_of(spec: RunSpec, endpoints: Endpoints = ENDPOINTS) -> dict[str, RoleSpec]:
    identity = Identity(RUN / "keys", ROOT_KEY)
    machine = Machine("python", (0, 1), {})
    run = PreparedRun(spec, RUN, endpoints, identity, machine, lock=-1)
    return {role.name: role for role in role_specs(run)}


def line(role: RoleSpec) -> str:
    return " ".join(role.command)


def speaking(name: str, port: int) -> str:
    return (
        f"--island {name} --coordinator-url {HERE}:8000 --key /runs/reads/keys/island-{name}.key "
        f"--share-url {HERE}:{port} --share-store /runs/reads/store/shares-{name}"
    )


def test_names_of_processes_groups_and_servers() -> None:
    spec = island_run({"name": "a"}, {"name": "b", "hosts": 2}, {"name": "c"})
    assert role_names(spec) == [
        *("origin", "coordinator", "publisher", "learner"),
        *("island-b-0", "island-b-1", "island-c", "shares-a", "shares-b", "shares-c"),
    ]
    shares = ["shares-a", "shares-b", "shares-c"]
    assert server_names(spec) == ["coordinator", "origin", "island-b-0", *shares]
    assert rendezvous_names(spec) == ["island-b-0"]
    assert trunk_names(spec)[-1] == "shares-a"
    groups = placeable(spec)
    assert groups["island-b"] == ["island-b-0", "island-b-1", "shares-b"]
    assert elsewhere(island_run(roles=[])) == {"island-b", "shares-b"}


def test_each_island_is_a_learner_and_a_server_of_its_shares() -> None:
    roles = roles_of(island_run())
    own = "/runs/reads/work/island-b"
    assert line(roles["learner"]) == (
        f"python -m learner_jax train /runs/reads {speaking('a', 8002)}"
    )
    assert line(roles["island-b"]) == (
        f"python -m learner_jax train {own} {speaking('b', 8003)} "
        f"--weights {HERE}:8001 --public-key {ROOT_KEY}"
    )
    for name, port in (("a", 8002), ("b", 8003)):
        assert line(roles[f"shares-{name}"]) == (
            f"python -m broadcast origin /runs/reads/store/shares-{name} --listen 127.0.0.1:{port}"
        )
    # and only the trunk's end the run, by success or by failure
    assert [name for name, role in roles.items() if role.ends_run] == ["learner"]
    assert [name for name, role in roles.items() if role.may_fail] == ["island-b", "shares-b"]
    assert roles["island-b"].ends_when_sampled


def test_one_learner_is_started_as_before() -> None:
    roles = roles_of(supervised_spec())
    assert line(roles["learner"]) == "python -m learner_jax train /runs/reads"
    assert not roles.keys() & {"shares-a", "island-b"}


def test_an_island_of_two_hosts_speaks_through_the_first() -> None:
    member = {"name": "b", "hosts": 2, "mesh": {"fsdp": 4}, "hardware": {**CPU, "count": 4}}
    roles = roles_of(island_run({"name": "a"}, member))
    first, second = roles["island-b-0"], roles["island-b-1"]
    meet = "--coordinator 127.0.0.1:8004 --process"
    assert f"train /runs/reads/work/island-b {meet} 0" in line(first)
    assert line(second).endswith(f"work/island-b {meet} 1 --heartbeat 10 --island b")
    assert "--key" in line(first) and "--key" not in line(second)
    # and each has its part of the island's devices, not of the learner's
    assert all("device_count=2" in role.env["XLA_FLAGS"] for role in (first, second))


def test_islands_share_the_cores_evenly() -> None:
    members = [{"name": name} for name in "abcd"]
    shares = {name: f"{HERE}:{8002 + i}" for i, name in enumerate("abcd")}
    endpoints = replace(ENDPOINTS, shares=shares, islands={})
    roles = roles_of(island_run(*members), endpoints)
    names = ("learner", "island-b", "island-c", "island-d")
    assert [roles[name].cores for name in names] == [(0,), (1,), (0,), (1,)]
    assert roles["shares-a"].cores == ()
    assert assign_cores(["x", "y", "z"], range(3), others=False, evenly=True)["z"] == (2,)


def test_islands_of_one_machine_have_accelerators_of_their_own() -> None:
    member = {"name": "b", "hardware": {**GPU, "count": 1}, "mesh": {"fsdp": 1}}
    islands = {"members": [{"name": "a"}, member, {"name": "c"}]}
    spec = supervised_spec(learner={"hardware": GPU, "islands": islands})
    here = set(role_names(spec))
    assert assign_devices(spec, here) == {
        "learner": [0, 1],
        "island-b": [2],
        "island-c": [3, 4],
    }
    assert assign_devices(spec, {"island-c", "shares-c"}) == {}


def test_servers_of_shares_have_ports_and_public_addresses() -> None:
    proxied = {"name": "b", "url": "https://b.example.org/"}
    spec = island_run({"name": "a"}, proxied, {"name": "c", "url": f"{HERE}:9100"})
    found = plan_endpoints(spec, None, lambda host, port: True, Random(0))
    assert set(found.shares) == {"a", "b", "c"}
    assert found.shares["c"] == f"{HERE}:9100"
    assert found.shares_url("b") == "https://b.example.org"
    assert found.shares["b"].startswith(f"{HERE}:")
    assert found.shares_url("a") == found.shares["a"]
    # and of an island elsewhere nothing listens here
    away = spec.model_copy(update={"placement": spec.placement.model_copy(update={"roles": []})})
    found = plan_endpoints(away, None, lambda host, port: True, Random(0))
    assert set(found.shares) == {"a"}


def signed_roles(identity: Identity) -> dict[str, str]:
    data = identity.roles_file.read_bytes()
    roles = open_roles(data, root_public_key=identity.root_public_key, run="reads")
    return dict(roles.islands)


def test_every_island_has_a_key_that_the_root_names(tmp_path: Path) -> None:
    # given a run whose roles.json names no islands yet
    make_identity(tmp_path, supervised_spec())
    # when it gets islands
    identity = make_identity(tmp_path, island_run())
    # then their keys are made and signed, once
    expected = {
        name: SigningKey.load(tmp_path / "keys" / f"island-{name}.key").public_hex for name in "ab"
    }
    assert signed_roles(identity) == expected
    before = identity.roles_file.read_bytes()
    assert make_identity(tmp_path, island_run()).roles_file.read_bytes() == before


def test_a_pinned_root_must_name_the_islands_that_start_here(tmp_path: Path) -> None:
    # given keys under a root that names island a alone
    identity = make_identity(tmp_path, island_run())
    root = SigningKey.load(tmp_path / "keys" / "root.key")
    held = {
        role: [SigningKey.load(identity.key(role)).public_hex]
        for role in ("publisher", "coordinator")
    }
    islands = signed_roles(identity)
    del islands["b"]
    signed = sign_roles("reads", held | {"validator": []}, root, valid_s=1e6, islands=islands)
    identity.roles_file.write_bytes(signed)
    pinned = {"root_public_key": root.public_hex}
    spec = island_run().model_copy(update={"identity": supervised_spec(identity=pinned).identity})
    # then b is refused here, and welcome elsewhere
    with pytest.raises(UserError, match="does not name this key as island-b"):
        make_identity(tmp_path, spec)
    away = spec.placement.model_copy(update={"roles": []})
    make_identity(tmp_path, spec.model_copy(update={"placement": away}))


def bundles_of(folder: Path, spec: RunSpec) -> dict[str, Bundle]:
    identity = make_identity(folder, spec)
    made = make_bundles(site_spec(spec, identity.root_public_key), identity)
    return {bundle.group: decode_bundle(bundle.encode(), place="test") for bundle in made}


def test_a_bundle_has_an_island_and_its_server_and_one_key(tmp_path: Path) -> None:
    spec = island_run({"name": "a"}, {"name": "b", "hosts": 2}, {"name": "c"})
    bundles = bundles_of(tmp_path / "site", spec)
    assert {name: (bundle.roles, set(bundle.keys)) for name, bundle in bundles.items()} == {
        "trunk": (
            ("trunk", "origin", "coordinator", "publisher", "learner", "shares-a"),
            {"coordinator", "publisher", "island-a"},
        ),
        "island-b-0": (("island-b-0", "shares-b"), {"island-b"}),
        "island-b-1": (("island-b-1",), set()),
        "island-c": (("island-c", "shares-c"), {"island-c"}),
    }
    # and lays out the folder that the island takes for a run directory
    own = tmp_path / "own"
    install(bundles["island-c"], own)
    assert load_resolved(own / "work" / "island-c") == load_resolved(own)
    assert (own / "keys" / "island-c.key").exists()


def test_a_site_starts_an_island_by_two_commands_from_one_bundle() -> None:
    groups = {group.name: group for group in groups_of(island_run())}
    assert list(groups) == ["trunk", "island-b"]
    island = groups["island-b"]
    assert (island.members, island.beside) == (("island-b",), ("shares-b",))
    assert (island.disk, island.restart) == (Disk.OWN, Restart.ALONE)
    for process in (*island.members, *island.beside):
        assert island.command(process, PurePath("bundles"), PurePath("/data")) == (
            *("runspec", "role", process, "--bundle", "bundles/island-b.json", "--dir", "/data"),
        )


def test_a_sites_islands_have_addresses() -> None:
    far = {"name": "b", "hosts": 2, "url": "http://10.0.0.7:9000"}
    spec = site_spec(island_run({"name": "a"}, far, {"name": "c"}, host="10.0.0.1"), ROOT_KEY)
    endpoints = fixed_endpoints(spec)
    assert endpoints.shares == {
        "a": f"http://10.0.0.1:{BASE_PORT + 3}",
        "b": "http://10.0.0.7:9000",
        "c": f"http://10.0.0.1:{BASE_PORT + 5}",
    }
    # and the processes of one island meet on the machine of the first
    assert endpoints.islands == {"island-b-0": f"http://10.0.0.7:{BASE_PORT + 2}"}


def test_islands_find_the_resolved_spec_in_their_folders(tmp_path: Path) -> None:
    spec = island_run({"name": "a"}, {"name": "b", "hosts": 2}, {"name": "c"})
    write_spec(spec, tmp_path, {"learner", "island-b-1"})
    assert load_resolved(tmp_path / "work" / "island-b") == load_resolved(tmp_path) == spec
    assert not (tmp_path / "work" / "island-c").exists()


RULES = Rules(restarts=2, ends_run=frozenset({"learner"}), may_fail=frozenset({"island-b"}))


def after(*ends: tuple[float, str, int]) -> Fleet:
    """A fleet after roles ended, each at a time and with an exit code, and were started again."""
    fleet = Fleet({name: RoleState() for name in ("learner", "island-b")}, deepcopy(RULES))
    fleet.tick(0.0)
    for now, name, code in ends:
        fleet.ready(name, now)
        fleet.exited(name, code, now)
        fleet.tick(now + 60.0)
    return fleet


def test_an_island_that_keeps_dying_is_started_again_and_the_run_goes_on() -> None:
    fleet = after(*((100.0 * i, "island-b", -9) for i in range(1, 2000)))
    assert fleet.outcome is None
    assert (fleet.roles["island-b"].state, fleet.roles["island-b"].restarts) == (
        State.STARTING,
        1999,
    )
    assert after(*((100.0 * i, "learner", -9) for i in range(1, 4))).outcome == Outcome(
        "failed", "learner", -9
    )


def test_an_island_that_cannot_go_on_rests_and_the_run_goes_on() -> None:
    fleet = after((100.0, "island-b", EXIT_FINAL))
    assert (fleet.outcome, fleet.roles["island-b"].state) == (None, State.FAILED)
    assert fleet.alive == ["learner"]
