"""Keys of a run: made once, renewed one by one, the old ones revoked everywhere."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from broadcast.keygen import make_keys, renew_keys
from runspec.core.errors import UserError
from runspec.core.keys import SigningKey
from runspec.core.roles import Roles, open_roles
from tests.waiting import eventually

from .conftest import Run, weights


def public(keys: Path, name: str) -> str:
    return SigningKey.load(keys / f"{name}.key").public_hex


def roles_in(keys: Path) -> Roles:
    root = (keys / "root.pub").read_text().strip()
    return open_roles((keys / "roles.json").read_bytes(), root_public_key=root, run="demo")


def test_keys_are_never_overwritten(tmp_path: Path) -> None:
    make_keys(tmp_path, run="demo")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(UserError, match=r"root\.key exists already"):
        make_keys(tmp_path, run="demo")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_one_key_is_renewed_and_the_others_stay(tmp_path: Path) -> None:
    make_keys(tmp_path, run="demo", validators=3)
    names = ["publisher", "coordinator", *(f"validator-{i}" for i in range(3))]
    before, old = {name: public(tmp_path, name) for name in names}, roles_in(tmp_path)

    renew_keys(tmp_path, ["validator-1", "publisher"])

    after, new = {name: public(tmp_path, name) for name in names}, roles_in(tmp_path)
    assert {name for name in names if before[name] != after[name]} == {"validator-1", "publisher"}
    assert new.publisher == {after["publisher"]} and new.coordinator == old.coordinator
    assert new.validator == {after[f"validator-{i}"] for i in range(3)}
    assert new.issued > old.issued
    assert not list(tmp_path.glob("*.new"))


def test_an_expired_roles_file_is_renewed_and_the_private_keys_may_lie_elsewhere(
    tmp_path: Path,
) -> None:
    make_keys(tmp_path, run="demo", valid_s=-1000.0)
    for name in ("publisher", "coordinator", "validator-0"):
        (tmp_path / f"{name}.key").rename(tmp_path / f"{name}.elsewhere")
    renew_keys(tmp_path, [])
    assert roles_in(tmp_path).expires > time.time()


def test_a_clock_that_was_set_back_does_not_keep_an_old_key(tmp_path: Path) -> None:
    make_keys(tmp_path, run="demo")
    issued = []
    for _ in range(3):
        renew_keys(tmp_path, ["publisher"])
        issued.append(roles_in(tmp_path).issued)
    assert issued == sorted(set(issued))


@pytest.mark.parametrize(
    "name",
    ["root", "validator", "validator-1", "validator-x", "validator-00", "../publisher", ""],
)
def test_no_such_key(tmp_path: Path, name: str) -> None:
    make_keys(tmp_path, run="demo")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(UserError, match="there is no key"):
        renew_keys(tmp_path, [name])
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_roles_of_another_root_are_not_renewed(tmp_path: Path) -> None:
    make_keys(tmp_path / "ours", run="demo")
    make_keys(tmp_path / "theirs", run="demo")
    theirs = (tmp_path / "theirs" / "roles.json").read_bytes()
    (tmp_path / "ours" / "roles.json").write_bytes(theirs)
    with pytest.raises(UserError, match="cannot be renewed"):
        renew_keys(tmp_path / "ours", ["publisher"])


def test_a_relay_hears_of_a_revocation_without_a_new_version(run: Run) -> None:
    # given a relay that was up before the revocation, of which the origin tells
    run.publish(0, weights())
    relay = run.relay(run.origin().url)
    assert run.client(relay.url).latest(None, 10) is not None
    before = (run.folder / "relay" / "demo" / "roles.json").read_bytes()
    renew_keys(run.keys, ["publisher"])
    (run.store / "demo" / "roles.json").write_bytes(run.roles)

    # when it starts again (or a minute has passed)
    relay.stop()
    run.relay(run.origin().url)

    # then it has the new roles, although all that it sees is by the old key
    path = run.folder / "relay" / "demo" / "roles.json"
    eventually(lambda: path.read_bytes() == run.roles != before, "the relay has the new roles")
