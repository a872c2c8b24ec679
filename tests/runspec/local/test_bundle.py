"""What each bundle of a site holds, and what of a file is refused."""

from __future__ import annotations

import json
import stat
from dataclasses import replace
from pathlib import Path

import pytest

from runspec.core.errors import UserError
from runspec.core.keys import SigningKey
from runspec.core.roles import read_own_workers, sign_roles
from runspec.local.bundle import (
    MAX_BYTES,
    Bundle,
    decode_bundle,
    install,
    load_bundle,
    make_bundles,
)
from runspec.local.identity import Identity, make_identity
from runspec.local.site import site_spec
from tests.runspec.local.fake_run import small_spec

LARGE = ("learner.hosts=2", "verify.validators=2", "samplers.volunteers.replicas=2")


def bundles_of(folder: Path, *overrides: str) -> tuple[Identity, dict[str, Bundle]]:
    spec = small_spec("small", 5, *overrides)
    identity = make_identity(folder, spec)
    made = make_bundles(site_spec(spec, identity.root_public_key), identity)
    return identity, {bundle.group: bundle for bundle in made}


def test_a_bundle_holds_the_private_keys_of_its_own_processes_alone(tmp_path: Path) -> None:
    # given a site with more than one of everything
    identity, bundles = bundles_of(tmp_path, *LARGE)
    # then each bundle has the keys of its processes, and relays and learner hosts have none
    assert {name: set(bundle.keys) for name, bundle in bundles.items()} == {
        "trunk": {"coordinator", "publisher"},
        "learner-1": set(),
        "relay-local": set(),
        "evaluator": {"evaluator"},
        "validator-0": {"validator-0"},
        "validator-1": {"validator-1"},
        "volunteers-0": {"volunteers-0"},
        "volunteers-1": {"volunteers-1"},
    }
    # and no other secret is anywhere in its bytes, the root's least of all
    secrets = {
        path.stem: SigningKey.load(path).secret_hex for path in identity.folder.glob("*.key")
    }
    assert {"root", "coordinator", "validator-1", "volunteers-1"} < secrets.keys()
    for bundle in bundles.values():
        text = bundle.encode().decode()
        assert {name for name, secret in secrets.items() if secret in text} == set(bundle.keys)


def test_the_trunk_alone_knows_the_public_keys_of_own_workers(tmp_path: Path) -> None:
    identity, bundles = bundles_of(tmp_path, *LARGE)
    own = {
        name: SigningKey.load(identity.key(name)).public_hex
        for name in ("volunteers-0", "volunteers-1")
    }
    assert bundles["trunk"].workers == own
    assert bundles["trunk"].roles == ("trunk", "origin", "coordinator", "publisher", "learner")
    assert all(not bundles[name].workers for name in bundles.keys() - {"trunk"})
    assert all(bundles[name].roles == (name,) for name in bundles.keys() - {"trunk"})


def test_a_bundle_is_the_same_after_its_file(tmp_path: Path) -> None:
    identity, bundles = bundles_of(tmp_path)
    for bundle in bundles.values():
        assert decode_bundle(bundle.encode(), place="here") == bundle
        assert bundle.root_public_key == identity.root_public_key
        assert bundle.spec.placement.base_port is not None


def test_a_folder_gets_what_the_bundle_has_for_its_owner_alone(tmp_path: Path) -> None:
    _, bundles = bundles_of(tmp_path / "site")
    for name, bundle in bundles.items():
        folder = tmp_path / name
        identity = install(bundle, folder)
        keys = {path.stem: path for path in identity.folder.glob("*.key")}
        assert keys.keys() == bundle.keys.keys()
        for path in keys.values():
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(identity.folder.stat().st_mode) == 0o700
        # and a second time changes nothing
        install(bundle, folder)
    assert read_own_workers(tmp_path / "trunk" / "keys") == bundles["trunk"].workers
    assert not (tmp_path / "validator-0" / "keys" / "roles.json").exists()


@pytest.mark.parametrize("name", ["trunk", "validator-0", "relay-local"])
def test_a_folder_of_another_run_is_refused_and_left_as_it_is(tmp_path: Path, name: str) -> None:
    # given a role's folder of another site
    (theirs,), (ours,) = (
        [bundles_of(tmp_path / site)[1][name]] for site in ("site", "another site")
    )
    folder = tmp_path / "role"
    install(theirs, folder)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    # when a bundle of this site is brought there, then it is refused
    with pytest.raises(UserError, match=r"another .*lies here") as error:
        install(ours, folder)
    assert str(folder) in error.value.place and "name another --dir" in error.value.remedy
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def test_what_is_no_bundle_is_named_with_its_place_and_remedy(tmp_path: Path) -> None:
    _, bundles = bundles_of(tmp_path)
    whole = json.loads(bundles["validator-0"].encode())
    unpinned = {**whole["spec"], "identity": {"root_public_key": None}}
    damaged = {
        "cut short": json.dumps(whole)[:-20],
        "no JSON object": "[]",
        "another format": json.dumps({**whole, "format": 2}),
        "no spec": json.dumps({key: value for key, value in whole.items() if key != "spec"}),
        "a bad spec": json.dumps({**whole, "spec": {"name": "small"}}),
        "no root": json.dumps({**whole, "spec": unpinned}),
        "no key": json.dumps({**whole, "keys": {"validator-0": "abc"}}),
        "keys as a list": json.dumps({**whole, "keys": []}),
        "a key's path": json.dumps({**whole, "keys": {"../key": "ab" * 32}}),
        "a strange role": json.dumps({**whole, "roles": ["validator-7"]}),
        "bytes": "\udcff",
        "too large": " " * (MAX_BYTES + 1),
    }
    path = tmp_path / "bundle.json"
    for what, text in damaged.items():
        path.write_bytes(text.encode(errors="surrogateescape"))
        with pytest.raises(UserError, match="not a bundle: ") as error:
            load_bundle(path)
        assert error.value.place == str(path), what
        assert "runspec prepare" in error.value.remedy, what
    path.unlink()
    with pytest.raises(UserError, match="cannot read the bundle: No such file") as error:
        load_bundle(path)
    assert "runspec prepare" in error.value.remedy


def test_an_expired_roles_json_is_said_with_its_remedy(tmp_path: Path) -> None:
    identity, bundles = bundles_of(tmp_path)
    bundle, root = bundles["validator-0"], SigningKey.load(identity.key("root"))
    held = {role: [root.public_hex] for role in ("publisher", "coordinator", "validator")}
    old = sign_roles("small", held, root, valid_s=60.0, now=1e9)
    with pytest.raises(UserError, match=r"roles\.json in it does not count: roles: expired") as no:
        decode_bundle(replace(bundle, roles_document=old).encode(), place="b.json")
    assert no.value.place == "b.json" and "runspec prepare" in no.value.remedy
    # and one that another root signed
    other = sign_roles("small", held, SigningKey.generate(), valid_s=60.0)
    with pytest.raises(UserError, match=r"roles\.json in it does not count"):
        decode_bundle(replace(bundle, roles_document=other).encode(), place="b.json")
