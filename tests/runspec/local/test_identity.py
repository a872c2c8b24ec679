"""Keys and roles.json of a run."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from runspec.core.errors import UserError
from runspec.core.keys import SigningKey
from runspec.core.roles import open_roles, sign_roles
from runspec.local.identity import YEAR_S, Identity, make_identity
from tests.runspec.local.fake_run import small_spec

DAY_S = 86400.0


def public(identity: Identity, role: str) -> str:
    return SigningKey.load(identity.key(role)).public_hex


def test_a_throw_away_root_signs_the_keys_it_made(tmp_path: Path) -> None:
    # given a run without a pinned root
    spec = small_spec("small", 5, "verify.validators=2", "samplers.volunteers.replicas=2")
    # when its identity is made
    identity = make_identity(tmp_path, spec)
    # then the roles are those keys, and workers' keys lie beside them
    roles = open_roles(
        identity.roles_file.read_bytes(), root_public_key=identity.root_public_key, run="small"
    )
    assert roles.publisher == {public(identity, "publisher")}
    assert roles.coordinator == {public(identity, "coordinator")}
    assert roles.validator == {public(identity, f"validator-{i}") for i in range(2)}
    names = {path.name for path in (tmp_path / "keys").glob("*.key")}
    assert {"root.key", "volunteers-0.key", "volunteers-1.key"} < names
    # and only their owner can read them
    for path in (tmp_path / "keys").glob("*.key"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_validator_that_is_started_no_more_may_still_have_signed(tmp_path: Path) -> None:
    """What it judged before is still to be trained, and audited."""
    # given a run of two validators
    make_identity(tmp_path, small_spec("small", 5, "verify.validators=2"))
    # when it goes on with one, and with three
    for count in (1, 3):
        identity = make_identity(tmp_path, small_spec("small", 5, f"verify.validators={count}"))
        # then roles.json names all that there ever were
        roles = open_roles(
            identity.roles_file.read_bytes(), root_public_key=identity.root_public_key, run="small"
        )
        held = {public(identity, f"validator-{i}") for i in range(max(2, count))}
        assert roles.validator == held


def test_roles_are_signed_again_when_half_expired(tmp_path: Path) -> None:
    spec = small_spec("small", 5, "budget.max_hours=null")

    def expires_when_applied_at(now: float) -> float:
        identity = make_identity(tmp_path, spec, now=lambda: now)
        data, root = identity.roles_file.read_bytes(), identity.root_public_key
        return open_roles(data, root_public_key=root, run="small", now=now).expires

    assert expires_when_applied_at(0.0) == YEAR_S
    assert expires_when_applied_at(0.4 * YEAR_S) == YEAR_S
    assert expires_when_applied_at(0.6 * YEAR_S) == 1.6 * YEAR_S


def test_a_pinned_root_brings_its_own_roles(tmp_path: Path) -> None:
    # given a root elsewhere that signed these keys
    root = SigningKey.generate()
    keys = {
        name: SigningKey.generate()
        for name in ("publisher", "coordinator", "evaluator", "validator-0")
    }
    for name, key in keys.items():
        key.save(tmp_path / "keys" / f"{name}.key")
    held = {name.split("-")[0]: [key.public_hex] for name, key in keys.items()}
    data = sign_roles("small", held, root, valid_s=DAY_S)
    (tmp_path / "keys" / "roles.json").write_bytes(data)
    spec = small_spec("small", 5, f"identity.root_public_key={root.public_hex}")
    # when the run takes them, then it makes no root and no roles of its own
    identity = make_identity(tmp_path, spec)
    assert identity.root_public_key == root.public_hex
    assert identity.roles_file.read_bytes() == data
    assert not identity.key("root").exists()
    assert identity.key("volunteers-0").exists()


def test_a_pinned_root_without_its_files_is_an_error(tmp_path: Path) -> None:
    spec = small_spec("small", 5, f"identity.root_public_key={'ab' * 32}")
    with pytest.raises(UserError, match=r"no roles\.json signed by this root"):
        make_identity(tmp_path, spec)


def test_a_key_that_the_pinned_roles_do_not_name_is_an_error(tmp_path: Path) -> None:
    root, named = SigningKey.generate(), SigningKey.generate()
    held = {role: [named.public_hex] for role in ("publisher", "coordinator", "validator")}
    (tmp_path / "keys").mkdir()
    (tmp_path / "keys" / "roles.json").write_bytes(sign_roles("small", held, root, valid_s=DAY_S))
    SigningKey.generate().save(tmp_path / "keys" / "publisher.key")
    spec = small_spec("small", 5, f"identity.root_public_key={root.public_hex}")
    with pytest.raises(UserError, match="does not name this key as publisher"):
        make_identity(tmp_path, spec)
