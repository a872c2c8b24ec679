"""A run of several machines: keys and roles.json, groups and addresses, and their bundles."""

from __future__ import annotations

import json
import stat
from dataclasses import replace
from pathlib import Path, PurePath
from typing import Any

import pytest

from runspec.core.errors import UserError
from runspec.core.roles import Roles, open_roles, read_own_workers, sign_roles
from runspec.core.schema import RunSpec
from runspec.core.schema.load import load_resolved
from runspec.core.signed import SigningKey
from runspec.local.endpoints import fixed_endpoints
from runspec.local.identity import YEAR_S, Identity, make_identity
from runspec.local.run_dir import write_spec
from runspec.local.site import (
    BASE_PORT,
    MAX_BYTES,
    Bundle,
    Disk,
    decode_bundle,
    groups_of,
    install,
    load_bundle,
    make_bundles,
    site_spec,
)
from tests.runspec.local.fake_run import island_run, small_spec
from tests.runspec.supervised import supervised_spec

ROOT_KEY = "ab" * 32
THREE_ISLANDS = ({"name": "a"}, {"name": "b", "hosts": 2}, {"name": "c"})


def public(identity: Identity, role: str) -> str:
    return SigningKey.load(identity.key(role)).public_hex


def roles_in(identity: Identity, run: str = "small") -> Roles:
    data = identity.roles_file.read_bytes()
    return open_roles(data, root_public_key=identity.root_public_key, run=run)


def test_a_throw_away_root_signs_the_keys_it_made(tmp_path: Path) -> None:
    spec = small_spec("small", 5, "verify.validators=2", "samplers.volunteers.replicas=2")
    identity = make_identity(tmp_path, spec)
    # then the roles are those keys, and workers' keys lie beside them
    roles = roles_in(identity)
    assert roles.publisher == {public(identity, "publisher")}
    assert roles.coordinator == {public(identity, "coordinator")}
    assert roles.evaluator == {public(identity, "evaluator")}
    assert roles.validator == {public(identity, f"validator-{i}") for i in range(2)}
    paths = {path.name: path for path in (tmp_path / "keys").glob("*.key")}
    assert {"root.key", "volunteers-0.key", "volunteers-1.key"} < paths.keys()
    assert {stat.S_IMODE(path.stat().st_mode) for path in paths.values()} == {0o600}
    # and a validator that is started no more may still have signed
    for count in (1, 3):
        again = make_identity(tmp_path, small_spec("small", 5, f"verify.validators={count}"))
        held = {public(again, f"validator-{i}") for i in range(max(2, count))}
        assert roles_in(again).validator == held


def test_roles_are_signed_again_when_half_expired(tmp_path: Path) -> None:
    spec = small_spec("small", 5, "budget.max_hours=null")

    def expires_when_applied_at(now: float) -> float:
        identity = make_identity(tmp_path, spec, now=lambda: now)
        data, root = identity.roles_file.read_bytes(), identity.root_public_key
        return open_roles(data, root_public_key=root, run="small", now=now).expires

    times = (0.0, 0.4 * YEAR_S, 0.6 * YEAR_S)
    assert [expires_when_applied_at(now) for now in times] == [YEAR_S, YEAR_S, 1.6 * YEAR_S]


def test_a_pinned_root_must_name_the_keys_that_start_here(tmp_path: Path) -> None:
    root, named = SigningKey.generate(), SigningKey.generate()
    spec = small_spec("small", 5, f"identity.root_public_key={root.public_hex}")
    with pytest.raises(UserError, match=r"no roles\.json signed by this root"):
        make_identity(tmp_path, spec)
    held = {role: [named.public_hex] for role in ("publisher", "coordinator", "validator")}
    (tmp_path / "keys" / "roles.json").write_bytes(sign_roles("small", held, root, valid_s=9e4))
    SigningKey.generate().save(tmp_path / "keys" / "publisher.key")
    with pytest.raises(UserError, match="does not name this key as publisher"):
        make_identity(tmp_path, spec)


def test_every_island_has_a_key_that_the_root_names(tmp_path: Path) -> None:
    # given a run whose roles.json names no islands yet, when it gets islands
    make_identity(tmp_path, supervised_spec())
    identity = make_identity(tmp_path, island_run())
    # then their keys are made and signed, once
    islands = {name: public(identity, f"island-{name}") for name in "ab"}
    assert roles_in(identity, "reads").islands == islands
    before = identity.roles_file.read_bytes()
    assert make_identity(tmp_path, island_run()).roles_file.read_bytes() == before
    # and a pinned root that names island a alone lets b start elsewhere only
    root = SigningKey.load(identity.key("root"))
    held = {role: [public(identity, role)] for role in ("publisher", "coordinator")}
    held["validator"] = []
    signed = sign_roles("reads", held, root, valid_s=1e6, islands={"a": islands["a"]})
    identity.roles_file.write_bytes(signed)
    pinned = supervised_spec(identity={"root_public_key": root.public_hex}).identity
    spec = island_run().model_copy(update={"identity": pinned})
    with pytest.raises(UserError, match="does not name this key as island-b"):
        make_identity(tmp_path, spec)
    away = spec.placement.model_copy(update={"roles": []})
    make_identity(tmp_path, spec.model_copy(update={"placement": away}))


def test_the_trunk_keeps_the_run_and_all_others_wait_for_it(tmp_path: Path) -> None:
    found = {group.name: group for group in groups_of(small_spec())}
    assert list(found) == ["trunk", "relay-local", "validators", "evaluator", "volunteers"]
    for name, group in found.items():
        assert (group.disk is Disk.RUN) == (name == "trunk")
        assert group.waits_for == (() if name == "trunk" else ("trunk",))
    # and a command is what a person types
    command = found["validators"].command("validator-0", PurePath("bundles"), PurePath("/data"))
    words = "runspec role validator-0 --bundle bundles/validator-0.json --dir /data"
    assert " ".join(command) == words
    # and islands find the resolved spec in their folders
    spec = island_run(*THREE_ISLANDS)
    write_spec(spec, tmp_path, {"learner", "island-b-1"})
    assert load_resolved(tmp_path / "work" / "island-b") == load_resolved(tmp_path) == spec
    assert not (tmp_path / "work" / "island-c").exists()


def test_a_sites_spec_pins_the_root_and_every_address() -> None:
    spec = site_spec(small_spec("small", 5, "placement.host=10.0.0.7"), ROOT_KEY)
    assert spec.identity.root_public_key == ROOT_KEY
    assert fixed_endpoints(spec).all() == {
        "coordinator": f"http://10.0.0.7:{BASE_PORT}",
        "origin": f"http://10.0.0.7:{BASE_PORT + 1}",
        "relay-local": f"http://10.0.0.7:{BASE_PORT + 2}",
    }
    # and URLs of the spec's own stay
    own = ("placement.url=https://run.example.org/", "learner.hosts=2")
    named = small_spec("small", 5, "placement.base_port=9000", "placement.host=::1", *own)
    assert fixed_endpoints(site_spec(named, ROOT_KEY)).all() == {
        "coordinator": "https://run.example.org",
        "origin": "http://[::1]:9001",
        "relay-local": "http://[::1]:9002",
        "learner": "http://[::1]:9003",
    }
    # and islands have addresses; the processes of one meet on the machine of the first
    far = {"name": "b", "hosts": 2, "url": "http://10.0.0.7:9000"}
    spec = site_spec(island_run({"name": "a"}, far, host="10.0.0.1"), ROOT_KEY)
    shares = {"a": f"http://10.0.0.1:{BASE_PORT + 3}", "b": "http://10.0.0.7:9000"}
    assert fixed_endpoints(spec).shares == shares
    assert fixed_endpoints(spec).islands == {"island-b-0": f"http://10.0.0.7:{BASE_PORT + 2}"}


def bundles_of(folder: Path, spec: RunSpec) -> tuple[Identity, dict[str, Bundle]]:
    identity = make_identity(folder, spec)
    made = make_bundles(site_spec(spec, identity.root_public_key), identity)
    return identity, {bundle.group: bundle for bundle in made}


def test_a_bundle_holds_the_private_keys_of_its_own_processes_alone(tmp_path: Path) -> None:
    # given a site with more than one of everything
    two = ("learner.hosts=2", "verify.validators=2", "samplers.volunteers.replicas=2")
    identity, bundles = bundles_of(tmp_path, small_spec("small", 5, *two))
    # then each bundle has the keys of its processes, and relays and learner hosts have none
    keyed = ("evaluator", "validator-0", "validator-1", "volunteers-0", "volunteers-1")
    assert {name: set(bundle.keys) for name, bundle in bundles.items()} == {
        "trunk": {"coordinator", "publisher"},
        **{name: set() for name in ("learner-1", "relay-local")},
        **{name: {name} for name in keyed},
    }
    # and no other secret is anywhere in its bytes, the root's least of all
    secrets = {
        path.stem: SigningKey.load(path).secret_hex for path in identity.folder.glob("*.key")
    }
    assert {"root", "coordinator", "validator-1", "volunteers-1"} < secrets.keys()
    own = {name: public(identity, name) for name in ("volunteers-0", "volunteers-1")}
    trunk = ("trunk", "origin", "coordinator", "publisher", "learner")
    for name, bundle in bundles.items():
        text = bundle.encode().decode()
        assert {name for name, secret in secrets.items() if secret in text} == set(bundle.keys)
        # and the trunk alone knows the public keys of own workers
        assert bundle.workers == (own if name == "trunk" else {})
        assert bundle.roles == (trunk if name == "trunk" else (name,))
        # and its file brings all of it back
        assert decode_bundle(bundle.encode(), place="here") == bundle
    # and so has each island's, which lays out the folder that the island takes for a run directory
    _, bundles = bundles_of(tmp_path / "site", island_run(*THREE_ISLANDS))
    assert {name: (bundle.roles, set(bundle.keys)) for name, bundle in bundles.items()} == {
        "trunk": ((*trunk, "shares-a"), {"coordinator", "publisher", "island-a"}),
        "island-b-0": (("island-b-0", "shares-b"), {"island-b"}),
        "island-b-1": (("island-b-1",), set()),
        "island-c": (("island-c", "shares-c"), {"island-c"}),
    }
    folder = tmp_path / "own"
    install(decode_bundle(bundles["island-c"].encode(), place="test"), folder)
    assert load_resolved(folder / "work" / "island-c") == load_resolved(folder)
    assert (folder / "keys" / "island-c.key").exists()


def test_a_folder_gets_what_the_bundle_has_for_its_owner_alone(tmp_path: Path) -> None:
    (_, bundles), (_, others) = (
        bundles_of(tmp_path / site, small_spec()) for site in ("site", "another")
    )
    for name, bundle in bundles.items():
        folder = tmp_path / name
        install(bundle, folder)
        keys = folder / "keys"
        paths = {path.stem: path for path in keys.glob("*.key")}
        assert paths.keys() == bundle.keys.keys()
        assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in paths.values())
        assert stat.S_IMODE(keys.stat().st_mode) == 0o700
        before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        # and a second time changes nothing, while a bundle of another run is refused
        install(bundle, folder)
        with pytest.raises(UserError, match=r"another .*lies here") as error:
            install(others[name], folder)
        assert str(folder) in error.value.place and "name another --dir" in error.value.remedy
        assert before == {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    assert read_own_workers(tmp_path / "trunk" / "keys") == bundles["trunk"].workers
    assert not (tmp_path / "validator-0" / "keys" / "roles.json").exists()


def test_what_is_no_bundle_is_named_with_its_place_and_remedy(tmp_path: Path) -> None:
    identity, bundles = bundles_of(tmp_path, small_spec())
    bundle, root = bundles["validator-0"], SigningKey.load(identity.key("root"))
    whole = json.loads(bundle.encode())
    unpinned = {**whole["spec"], "identity": {"root_public_key": None}}
    changes: list[dict[str, Any]] = [
        {"format": 2},
        {"spec": {"name": "small"}},
        {"spec": unpinned},
        {"keys": {"validator-0": "abc"}},
        {"keys": []},
        {"keys": {"../key": "ab" * 32}},
        {"roles": ["validator-7"]},
    ]
    damaged = [json.dumps({**whole, **change}) for change in changes]
    damaged += [json.dumps(whole)[:-20], "[]", "\udcff", " " * (MAX_BYTES + 1)]
    path = tmp_path / "bundle.json"
    for text in damaged:
        path.write_bytes(text.encode(errors="surrogateescape"))
        with pytest.raises(UserError, match="not a bundle: ") as error:
            load_bundle(path)
        assert error.value.place == str(path), text[:80]
        assert "runspec prepare" in error.value.remedy, text[:80]
    with pytest.raises(UserError, match="cannot read the bundle: No such file"):
        load_bundle(tmp_path / "gone")
    # and so is a roles.json that has expired, or that another root signed
    held = {role: [root.public_hex] for role in ("publisher", "coordinator", "validator")}
    for signed, why in (
        (sign_roles("small", held, root, valid_s=60.0, now=1e9), "roles: expired"),
        (sign_roles("small", held, SigningKey.generate(), valid_s=60.0), ""),
    ):
        with pytest.raises(UserError, match=rf"roles\.json in it does not count: {why}") as no:
            decode_bundle(replace(bundle, roles_document=signed).encode(), place="b.json")
        assert no.value.place == "b.json" and "runspec prepare" in no.value.remedy
