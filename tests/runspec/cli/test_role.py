"""`runspec role`: what is refused before a process starts, and where a server listens.

Roles that wait for the trunk are in `tests/test_site_page.py`, a whole run in
`tests/e2e/test_join.py`.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from runspec.core.keys import SigningKey
from runspec.core.roles import sign_roles
from runspec.local.endpoints import port_answers
from runspec.local.run_dir import hold
from tests.harness import ROOT
from tests.runspec.cli.in_process import runspec
from tests.runspec.cli.sites import bundle, free_port, prepare
from tests.waiting import eventually, one_ended


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = prepare(folder, f"placement.base_port={free_port()}")
    assert done.returncode == 0, done.stderr
    return folder


@contextmanager
def started(name: str, file: Path, folder: Path, *words: str) -> Iterator[Path]:
    """A role in a process of its own; yields its log, which is in `folder`."""
    log = folder / f"{name}.log"
    command = ["runspec", "role", name, "--bundle", str(file), "--dir", str(folder / name)]
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", *command, *words], cwd=ROOT, stdout=out, stderr=out
        )
    try:
        eventually(
            lambda: log.stat().st_size, "its first words", hopeless=lambda: one_ended([process])
        )
        yield log
        assert process.poll() is None, log.read_text()
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)


def refused(done: CompletedProcess[str], *words: str) -> None:
    """One message with a place and a remedy, and a failure."""
    assert done.returncode in (1, 5), done.stderr
    assert done.stderr.startswith("error: ") and done.stderr.count("remedy: ") == 1, done.stderr
    for word in words:
        assert word in done.stderr


@pytest.mark.parametrize(
    ("name", "of", "words"),
    [
        ("validator-1", "validator-0", ("no role 'validator-1'", "one of: validator-0")),
        ("trunk", "volunteers-0", ("no role 'trunk'", "one of: volunteers-0")),
        ("root", "trunk", ("no role 'root'", "one of: trunk, origin, coordinator, publisher")),
        ("validator-0", "validator-9", ("cannot read the bundle", "runspec prepare")),
    ],
)
def test_a_role_that_the_bundle_has_not_and_a_bundle_that_is_not_there(
    site: Path, tmp_path: Path, name: str, of: str, words: tuple[str, ...]
) -> None:
    folder = tmp_path / "role"
    done = runspec("role", name, "--bundle", bundle(site, of), "--dir", folder)
    refused(done, str(bundle(site, of)), *words)
    assert not folder.exists()


def test_an_expired_bundle_starts_nothing(site: Path, tmp_path: Path) -> None:
    root = SigningKey.load(site / "keys" / "root.key")
    held = {role: [root.public_hex] for role in ("publisher", "coordinator", "validator")}
    old = sign_roles("small", held, root, valid_s=60.0, now=1e9).decode()
    for name in ("trunk", "validator-0"):
        whole = json.loads(bundle(site, name).read_text())
        (tmp_path / "old.json").write_text(json.dumps({**whole, "roles.json": old}))
        done = runspec("role", name, "--bundle", tmp_path / "old.json", "--dir", tmp_path / "role")
        refused(done, "old.json", "expired", "runspec prepare")
    assert not (tmp_path / "role").exists()


def test_the_folder_of_another_run_and_one_in_use(site: Path, tmp_path: Path) -> None:
    # given the folder of another site's validator
    prepare(tmp_path / "other")
    folder, ours = tmp_path / "role", bundle(site, "validator-0")
    other = json.loads(bundle(tmp_path / "other", "validator-0").read_text())
    SigningKey.from_secret(other["keys"]["validator-0"]).save(folder / "keys" / "validator-0.key")
    done = runspec("role", "validator-0", "--bundle", ours, "--dir", folder)
    refused(done, "validator-0.key: another key", "name another --dir")
    assert sorted(path.name for path in folder.rglob("*")) == ["keys", "validator-0.key"]
    # and one that a process works in
    own = tmp_path / "own"
    (own / "work" / "validator-0").mkdir(parents=True)
    with hold(own / "work" / "validator-0"):
        done = runspec("role", "validator-0", "--bundle", ours, "--dir", own)
    assert done.returncode == 5
    refused(done, f"validator-0 is alive: held by process {os.getpid()}", "name another --dir")
    assert not (own / "keys").exists()


@pytest.mark.parametrize("name", ["trunk", "coordinator", "relay-local", "validator-0"])
def test_a_folder_that_cannot_be_written(site: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / "file").touch()
    file = bundle(site, "trunk" if name == "coordinator" else name)
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        done = runspec("role", name, "--bundle", file, "--dir", folder)
        refused(done, str(folder), "the role's folder cannot be written", "--dir")


def test_listen_is_for_servers_and_needs_a_port(site: Path, tmp_path: Path) -> None:
    for name, value, words in (
        ("validator-0", "0.0.0.0:8443", "validator-0: has no address of its own"),
        ("trunk", "0.0.0.0:8443", "trunk: has no address of its own"),
        ("relay-local", "8443", "--listen: not an address"),
    ):
        listen = ("--dir", tmp_path / "role", "--listen", value)
        refused(runspec("role", name, "--bundle", bundle(site, name), *listen), words)
    assert not (tmp_path / "role").exists()


def test_a_server_behind_a_proxy_listens_where_it_is_told(tmp_path: Path) -> None:
    # given a relay and an origin that are reached by https
    relays = "broadcast.relays={local: {url: https://relay.example.org}}"
    prepare(tmp_path, relays, "broadcast.origin.url=https://origin.example.org")
    file = bundle(tmp_path, "relay-local")
    # when nobody says where the relay listens
    done = runspec("role", "relay-local", "--bundle", file, "--dir", tmp_path / "role")
    refused(done, "relay-local: reached at https://relay.example.org", "--listen HOST:PORT")
    assert not (tmp_path / "role").exists()
    # then it has to be said, and that is where it listens
    port = free_port()
    with started("relay-local", file, tmp_path, "--listen", f"127.0.0.1:{port}") as log:
        eventually(lambda: port_answers("127.0.0.1", port), "it listens", context=log.read_text)
        # and its folder is its own
        again = runspec(
            *("role", "relay-local", "--bundle", file, "--dir", tmp_path / "relay-local"),
            *("--listen", f"127.0.0.1:{port}"),
        )
        assert again.returncode == 5
        refused(again, "relay-local is alive: held by process")


def test_an_island_and_the_server_of_its_shares_have_one_bundle_and_one_folder(
    tmp_path: Path,
) -> None:
    # given a site of two islands
    spec = ROOT / "specs" / "opendiloco.yaml"
    sets = ("--set", "learner.islands.count=2", "--set", f"placement.base_port={free_port()}")
    done = runspec("prepare", spec, "--profile", "laptop", *sets, "-o", tmp_path)
    assert done.returncode == 0, done.stderr
    file = bundle(tmp_path, "island-1")
    for role in ("island-1", "shares-1"):
        assert f"runspec role {role} --bundle {file}" in done.stdout
    # when the server is started behind an address of its own
    port = free_port()
    with started("shares-1", file, tmp_path, "--listen", f"127.0.0.1:{port}") as log:
        eventually(lambda: port_answers("127.0.0.1", port), "it listens", context=log.read_text)
    # then its folder has what the island reads
    own = tmp_path / "shares-1"
    assert (own / "work" / "island-1" / "spec.json").exists()
    assert (own / "keys" / "island-1.key").exists()
    assert (own / "store" / "shares-1").is_dir()


def test_an_address_that_cannot_be_had_ends_a_server(site: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = f"127.0.0.1:{server.getsockname()[1]}"
        for at, words in (
            (taken, (f"{taken}: the port is taken", "remedy: end the process that holds it")),
            (
                "192.0.2.1:80",
                ("192.0.2.1:80: cannot listen", "an address of this machine with --listen"),
            ),
        ):
            done = subprocess.run(
                [
                    *(sys.executable, "-m", "runspec", "role", "relay-local", "--listen", at),
                    *("--bundle", bundle(site, "relay-local"), "--dir", tmp_path),
                ],
                capture_output=True,
                text=True,
                timeout=60,
            )
            assert done.returncode == 1
            assert all(word in done.stderr for word in words), done.stderr
            assert "Traceback" not in done.stderr


def test_a_trunk_that_cannot_start_here_says_what_is_missing(site: Path, tmp_path: Path) -> None:
    # given a secret that this machine has not
    prepare(tmp_path / "site", "secrets={TOKEN: {from: {env: NO_SUCH_SECRET}}}")
    run_dir = tmp_path / "run"
    file = bundle(tmp_path / "site", "trunk")
    done = runspec("role", "trunk", "--bundle", file, "--dir", run_dir)
    assert done.returncode == 1
    assert "small cannot start on this machine. Missing:" in done.stderr
    assert "secrets.TOKEN" in done.stderr and "NO_SUCH_SECRET is not set" in done.stderr
    # and a port that somebody has
    port = json.loads(bundle(site, "trunk").read_text())["spec"]["placement"]["base_port"]
    with socket.create_server(("127.0.0.1", port)):
        done = runspec("role", "trunk", "--bundle", bundle(site, "trunk"), "--dir", tmp_path / "r")
    refused(done, f"coordinator at 127.0.0.1:{port}: port {port} is taken by")
    # then no run was made
    assert [path.name for path in run_dir.iterdir()] == ["keys"]
    assert [path.name for path in (tmp_path / "r").iterdir()] == ["keys"]
