"""A run on several machines: `runspec prepare` makes a site, `runspec role` runs a part of it.

Roles that start are in `tests/test_site_page.py`, a whole run in `tests/e2e/test_join.py`.
"""

from __future__ import annotations

import os
import socket
import stat
import subprocess
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from runspec.core.schema.load import load_resolved
from runspec.core.signed import SigningKey
from runspec.local.run_dir import hold
from runspec.local.site import load_bundle
from tests.harness import ROOT, TARGET_SHORT
from tests.runspec.cli.in_process import runspec
from tests.runspec.local.fake_run import prepared, small_spec

pytestmark = pytest.mark.slow


def prepare(site: Path, *overrides: str) -> CompletedProcess[str]:
    """What `runspec prepare` says of a run `small`."""
    sets = [word for text in ("name=small", *overrides) for word in ("--set", text)]
    return runspec("prepare", TARGET_SHORT, "--profile", "laptop", *sets, "-o", site)


def bundle(site: Path, name: str) -> Path:
    return site / "bundles" / f"{name}.json"


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def refused(done: CompletedProcess[str], *words: str) -> None:
    """One message with a place and a remedy, and a failure."""
    assert done.returncode in (1, 5), done.stderr
    assert done.stderr.startswith("error: ") and done.stderr.count("remedy: ") == 1, done.stderr
    assert [word for word in words if word not in done.stderr] == [], done.stderr


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    assert prepare(folder).returncode == 0
    return folder


@pytest.fixture
def becomes(monkeypatch):
    """Commands that `runspec role` hands its process over to."""
    commands: list[tuple[str, ...]] = []

    def execute(file: str, command: tuple[str, ...], environment: dict[str, str]) -> None:
        commands.append(command)
        raise SystemExit(0)

    monkeypatch.setattr("os.execvpe", execute)
    return commands


def test_a_site_has_keys_bundles_and_the_commands_of_every_role(tmp_path):
    site = tmp_path / "site"
    done = prepare(site, f"storage.dir={tmp_path}", "placement.host=10.0.0.7")
    assert done.returncode == 0, done.stderr
    bundles = sorted((site / "bundles").iterdir())
    names = ["evaluator", "relay-local", "trunk", "validator-0", "volunteers-0"]
    assert [path.stem for path in bundles] == names
    # then only their owner reads bundles and private keys
    private = [*bundles, *(site / "keys").glob("*.key"), site / "bundles", site / "keys"]
    assert {stat.S_IMODE(path.stat().st_mode) & 0o077 for path in private} == {0}
    # and each command is printed as it is to be typed
    for name in set(names) - {"trunk"}:
        assert f"  runspec role {name} --bundle {bundle(site, name)}\n" in done.stdout
    trunk = f"runspec role trunk --bundle {bundle(site, 'trunk')} --dir {tmp_path / 'small'}\n"
    assert trunk in done.stdout and not (tmp_path / "small").exists()
    # and a site that nobody else could reach is said
    alone = "The trunk's servers are at 127.0.0.1: only its own machine reaches them"
    assert alone not in done.stdout and alone in prepare(tmp_path / "local").stdout


def test_a_site_pins_the_root_that_strangers_need(tmp_path):
    # given a spec that `apply` refuses: workers elsewhere could not know its root
    assert runspec("init", tmp_path / "own", "--template", "problems").returncode == 0
    words = (tmp_path / "own" / "spec.yaml", "--set", "placement.roles=[validators]")
    done = runspec("apply", *words, "--runs-dir", tmp_path)
    assert "unsigned-weights" in done.stderr and "runspec prepare" in done.stderr
    # then a site of it has one
    done = runspec("prepare", *words, "-o", tmp_path / "site")
    assert done.returncode == 0, done.stderr
    root = SigningKey.load(tmp_path / "site" / "keys" / "root.key")
    assert load_resolved(tmp_path / "site").identity.root_public_key == root.public_hex


def test_prepared_again_a_site_keeps_its_keys_and_takes_a_changed_spec(tmp_path):
    # given a site of two validators, when it is made again with one
    prepare(tmp_path, "verify.validators=2")
    keys = contents(tmp_path / "keys")
    assert bundle(tmp_path, "validator-1").exists()
    assert prepare(tmp_path, "verify.validators=1", "steps=7").returncode == 0
    # then the keys are the same, every bundle has the new spec, and the other's is gone
    assert contents(tmp_path / "keys") == keys
    specs = [load_bundle(path).spec for path in (tmp_path / "bundles").iterdir()]
    assert specs == [load_resolved(tmp_path)] * 5 and specs[0].steps == 7
    assert not bundle(tmp_path, "validator-1").exists()


def test_a_folder_of_something_else_is_no_site(tmp_path):
    # given a site, a run's own directory, and a file
    prepare(tmp_path / "site")
    with prepared(small_spec(), tmp_path) as run:
        pass
    (tmp_path / "file").touch()
    before = contents(tmp_path)
    # when another site is to be made there, then it is refused, and nothing is written
    for folder, name, words in (
        (tmp_path / "site", "other", "the site of another run, small"),
        (run.directory, "small", "a run's directory, not a site"),
        (tmp_path / "file" / "x", "small", "the site's folder cannot be written: Not a directory"),
    ):
        refused(prepare(folder, f"name={name}"), str(folder), words)
    assert contents(tmp_path) == before


LISTEN = ("--listen", "0.0.0.0:8443")
UNWRITABLE = [("--dir", "FILE"), ("--dir", "FILE/below")]


@pytest.mark.parametrize(
    ("name", "of", "more", "words"),
    [
        ("validator-1", "validator-0", (), ["no role 'validator-1'", "one of: validator-0"]),
        ("trunk", "volunteers-0", (), ["no role 'trunk'", "one of: volunteers-0"]),
        ("root", "trunk", (), ["no role 'root'", "one of: trunk, origin, coordinator, publisher"]),
        ("validator-0", "validator-9", (), ["cannot read the bundle", "runspec prepare"]),
        ("validator-0", "validator-0", LISTEN, ["validator-0: has no address of its own"]),
        ("trunk", "trunk", LISTEN, ["trunk: has no address of its own"]),
        ("relay-local", "relay-local", ("--listen", "8443"), ["--listen: not an address"]),
        *(
            (name, of, folder, ["the role's folder cannot be written", "--dir"])
            for name, of in (("trunk", "trunk"), ("coordinator", "trunk"), ("relay-local",) * 2)
            for folder in UNWRITABLE
        ),
    ],
)
def test_what_a_role_cannot_be_is_said_and_nothing_is_made(site, tmp_path, name, of, more, words):
    (tmp_path / "FILE").touch()
    own = [str(tmp_path / word) if word.startswith("FILE") else word for word in more]
    role = ("role", name, "--bundle", bundle(site, of), "--dir", tmp_path / "role")
    refused(runspec(*role, *own), *words)
    assert not (tmp_path / "role").exists()


def test_the_folder_of_another_run_and_one_in_use(site, tmp_path):
    # given the folder of another site's validator
    words, own = ("role", "validator-0", "--bundle", bundle(site, "validator-0")), tmp_path / "own"
    SigningKey.generate().save(tmp_path / "other" / "keys" / "validator-0.key")
    done = runspec(*words, "--dir", tmp_path / "other")
    refused(done, "validator-0.key: another key", "name another --dir")
    # and one that a process works in
    (own / "work" / "validator-0").mkdir(parents=True)
    with hold(own / "work" / "validator-0"):
        done = runspec(*words, "--dir", own)
    assert done.returncode == 5
    refused(done, f"validator-0 is alive: held by process {os.getpid()}", "name another --dir")
    assert not (own / "keys").exists()


def test_a_server_behind_a_proxy_listens_where_it_is_told(tmp_path, becomes):
    # given a relay and an origin that are reached by https
    relays = "broadcast.relays={local: {url: https://relay.example.org}}"
    prepare(tmp_path, relays, "broadcast.origin.url=https://origin.example.org")
    role = ("role", "relay-local", "--bundle", bundle(tmp_path, "relay-local"), "--dir")
    # when nobody says where the relay listens, then it has to be said
    done = runspec(*role, tmp_path / "role")
    refused(done, "relay-local: reached at https://relay.example.org", "--listen HOST:PORT")
    assert not (tmp_path / "role").exists()
    # and that is where it listens, in a folder of its own
    runspec(*role, tmp_path / "role", "--listen", "192.0.2.1:80")
    [command] = becomes
    own = str(tmp_path / "role")
    assert command[1:] == (*("-m", "runspec.role", "relay-local", own, "--listen"), "192.0.2.1:80")
    # and an address that this machine has not ends it with one message
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "192.0.2.1:80: cannot listen" in done.stderr
    assert "an address of this machine with --listen" in done.stderr


def test_the_server_of_an_islands_shares_listens_where_it_is_told(tmp_path, becomes):
    spec, file = ROOT / "specs" / "opendiloco.yaml", bundle(tmp_path, "island-1")
    sets = ("--set", "learner.islands.count=2")
    assert runspec("prepare", spec, "--profile", "laptop", *sets, "-o", tmp_path).returncode == 0
    listen = ("--listen", "127.0.0.1:1234")
    runspec("role", "shares-1", "--bundle", file, "--dir", tmp_path / "own", *listen)
    [command] = becomes
    assert command[-4:] == ("shares-1", str(tmp_path / "own"), *listen)


def test_a_trunk_that_cannot_start_here_says_what_is_missing(tmp_path):
    # given a secret that this machine has not
    prepare(tmp_path / "a", "secrets={TOKEN: {from: {env: NO_SUCH_SECRET}}}")
    role, own = ("role", "trunk", "--bundle"), tmp_path / "own"
    done = runspec(*role, bundle(tmp_path / "a", "trunk"), "--dir", own / "a")
    assert done.returncode == 1 and "small cannot start on this machine. Missing:" in done.stderr
    assert "secrets.TOKEN" in done.stderr and "NO_SUCH_SECRET is not set" in done.stderr
    # and a port that somebody has
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        prepare(tmp_path / "b", f"placement.base_port={port}")
        done = runspec(*role, bundle(tmp_path / "b", "trunk"), "--dir", own / "b")
    refused(done, f"coordinator at 127.0.0.1:{port}: port {port} is taken by")
    # then no run was made
    for name in "ab":
        assert [path.name for path in (own / name).iterdir()] == ["keys"]
