"""`runspec prepare`: what it makes, keeps and refuses."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from runspec.core.errors import UserError
from runspec.core.keys import SigningKey
from runspec.core.roles import sign_roles
from runspec.core.spec.resolved import load_resolved
from runspec.local.bundle import load_bundle
from tests.runspec.cli.in_process import runspec
from tests.runspec.cli.sites import bundle, prepare
from tests.runspec.local.fake_run import prepared, small_spec


def test_a_site_has_keys_bundles_and_the_commands_of_every_role(tmp_path: Path) -> None:
    site = tmp_path / "site"
    done = prepare(site, f"storage.dir={tmp_path}", "placement.host=10.0.0.7")
    assert done.returncode == 0, done.stderr
    bundles = sorted((site / "bundles").iterdir())
    names = ["evaluator", "relay-local", "trunk", "validator-0", "volunteers-0"]
    assert [path.stem for path in bundles] == names
    # then only their owner reads bundles and private keys
    for path in (*bundles, *(site / "keys").glob("*.key")):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    for name in ("bundles", "keys"):
        assert stat.S_IMODE((site / name).stat().st_mode) == 0o700
    # and each command is printed as it is to be typed
    for name in ("evaluator", "relay-local", "validator-0", "volunteers-0"):
        assert f"  runspec role {name} --bundle {bundle(site, name)}\n" in done.stdout
    trunk = f"runspec role trunk --bundle {bundle(site, 'trunk')} --dir {tmp_path / 'small'}\n"
    assert trunk in done.stdout
    assert "only its own machine" not in done.stdout
    assert not (tmp_path / "small").exists()


def test_a_site_pins_the_root_that_strangers_need(tmp_path: Path) -> None:
    # given a spec that `apply` refuses: workers elsewhere could not know its root
    assert runspec("init", tmp_path / "own", "--template", "problems").returncode == 0
    words = (tmp_path / "own" / "spec.yaml", "--set", "placement.roles=[validators]")
    refused = runspec("apply", *words, "--runs-dir", tmp_path)
    assert "unsigned-weights" in refused.stderr and "runspec prepare" in refused.stderr
    # then a site of it has one
    done = runspec("prepare", *words, "-o", tmp_path / "site")
    assert done.returncode == 0, done.stderr
    root = SigningKey.load(tmp_path / "site" / "keys" / "root.key")
    assert load_resolved(tmp_path / "site").identity.root_public_key == root.public_hex


def test_a_site_that_nobody_else_could_reach_is_said(tmp_path: Path) -> None:
    done = prepare(tmp_path)
    assert "The trunk's servers are at 127.0.0.1: only its own machine reaches them" in done.stdout


def test_prepared_again_a_site_keeps_its_keys_and_takes_a_changed_spec(tmp_path: Path) -> None:
    # given a site of two validators
    prepare(tmp_path, "verify.validators=2")
    keys = {path: path.read_bytes() for path in (tmp_path / "keys").glob("*.key")}
    assert bundle(tmp_path, "validator-1").exists()
    # when it is made again, with one
    done = prepare(tmp_path, "verify.validators=1", "steps=7")
    assert done.returncode == 0, done.stderr
    # then the keys are the same, every bundle has the new spec, and the other's is gone
    assert {path: path.read_bytes() for path in (tmp_path / "keys").glob("*.key")} == keys
    for path in (tmp_path / "bundles").iterdir():
        assert load_bundle(path).spec == load_resolved(tmp_path)
    assert load_resolved(tmp_path).steps == 7
    assert not bundle(tmp_path, "validator-1").exists()


def test_the_folder_of_another_run_is_refused(tmp_path: Path) -> None:
    # given a site and a run's own directory
    prepare(tmp_path / "site")
    with prepared(small_spec(), tmp_path) as run:
        pass
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    # when another site is to be made there
    for folder, name, words in (
        (tmp_path / "site", "other", "the site of another run, small"),
        (run.directory, "small", "a run's directory, not a site"),
    ):
        done = prepare(folder, f"name={name}")
        # then it is refused, and nothing is written
        assert done.returncode == 1
        assert f"error: {folder}: {words}" in done.stderr
        assert "remedy: name another folder with -o" in done.stderr
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_a_pinned_root_brings_its_own_keys(tmp_path: Path) -> None:
    # given a root elsewhere
    root = SigningKey.generate()
    pinned = f"identity.root_public_key={root.public_hex}"
    # when its files are missing, then the message says where they are to lie
    done = prepare(tmp_path, pinned)
    assert done.returncode == 1
    assert "no roles.json signed by this root" in done.stderr
    assert str(tmp_path / "keys") in done.stderr
    assert list((tmp_path / "keys").iterdir()) == []
    # and when they are brought
    names = ("publisher", "coordinator", "evaluator", "validator-0")
    keys = {name: SigningKey.generate() for name in names}
    for name, key in keys.items():
        key.save(tmp_path / "keys" / f"{name}.key")
    held = {name.split("-")[0]: [key.public_hex] for name, key in keys.items()}
    (tmp_path / "keys" / "roles.json").write_bytes(sign_roles("small", held, root, valid_s=600.0))
    assert prepare(tmp_path, pinned).returncode == 0
    # then the bundles have them, and no root was made
    made = load_bundle(bundle(tmp_path, "validator-0"))
    assert made.keys == {"validator-0": keys["validator-0"].secret_hex}
    assert made.root_public_key == root.public_hex
    assert not (tmp_path / "keys" / "root.key").exists()
    # and keys that roles.json does not name are refused
    (tmp_path / "keys" / "publisher.key").unlink()
    SigningKey.generate().save(tmp_path / "keys" / "publisher.key")
    done = prepare(tmp_path, pinned)
    assert done.returncode == 1
    assert "does not name this key as publisher" in done.stderr


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = prepare(tmp_path / "file" / "site")
    assert done.returncode == 1
    assert "the site's folder cannot be written: Not a directory" in done.stderr
    with pytest.raises(UserError):
        load_resolved(tmp_path)
