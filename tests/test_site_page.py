"""What docs/site.md shows is called as it stands, up to where a role waits for its coordinator.

A whole run by the page's commands is `tests/e2e/test_join.py`.
"""

from __future__ import annotations

import configparser
import json
import subprocess
from pathlib import Path

import pytest

from runspec.core.schema.load import load_resolved
from runspec.local.endpoints import port_answers
from runspec.local.site import load_bundle
from tests.harness import free_port
from tests.site_page import ADMIN, ROOT, Machines, commands, hidden, unit
from tests.waiting import eventually, one_ended

pytestmark = pytest.mark.nightly


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Machines:
    """Machines on which everything was called that only prepares."""
    made = Machines(tmp_path_factory.mktemp("machines"), tmp_path_factory.mktemp("trunk"))
    base = ("--set", f"placement.base_port={free_port(4)}")
    for machine, words in commands():
        if machine == ADMIN:
            made.call(machine, [*words, *base] if words[1] == "prepare" else words)
    return made


def test_namespaces_hide_a_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = subprocess.run([*hidden(tmp_path), "ls", tmp_path], capture_output=True, text=True)
    assert done.returncode == 0, f"mount namespaces are missing here: {done.stderr}"
    assert done.stdout == "" and (tmp_path / "file").exists()


def test_every_bundle_is_brought_to_one_machine(machines: Machines) -> None:
    brought = [words[1] for machine, words in commands() if words[0] == "scp"]
    made = sorted((machines.on(ADMIN) / "site" / "bundles").iterdir())
    assert sorted(Path(path).name for path in brought) == [path.name for path in made]
    # and each command that the page shows starts one of them
    started = [words[words.index("--bundle") + 1] for _, words in commands() if words[1] == "role"]
    assert sorted(started) == [path.name for path in made]
    # and the changed spec reached them all
    assert {load_bundle(path).spec.verify.prefill_share for path in made} == {0.5}


@pytest.mark.parametrize("machine", ["sampler", "validator"])
def test_a_role_says_for_whom_it_waits(machines: Machines, tmp_path: Path, machine: str) -> None:
    """It ends after `verify.COORDINATOR_S`: tests/sampler/worker/test_loop.py
    and tests/verify/test_coordinator_http.py hold that with shorter waits."""
    [words] = [words for on, words in commands() if on == machine]
    log = tmp_path / "log"
    process = machines.start(machine, words, log)
    base = load_resolved(machines.on(ADMIN) / "site").placement.base_port
    waits = f"waiting for the coordinator http://127.0.0.1:{base}: cannot be reached"
    try:
        eventually(
            lambda: waits in log.read_text(),
            "a message",
            hopeless=lambda: one_ended([process]),
            context=log.read_text,
        )
    finally:
        process.terminate()
        process.wait()


def test_the_unit_starts_a_role(machines: Machines, tmp_path: Path) -> None:
    read = configparser.ConfigParser(interpolation=None)
    read.read_string(unit())
    bundle = json.loads((machines.on("relay") / "relay-local.json").read_text())
    url = bundle["spec"]["broadcast"]["relays"][0]["url"]
    (tmp_path / "relay-local.json").write_text(json.dumps(bundle))
    line = read["Service"]["ExecStart"].replace("%i", "relay-local")
    for place, here in (
        ("/opt/runspec/bin/", ""),
        ("/etc/runspec", str(tmp_path)),
        ("/var/lib/runspec", str(tmp_path / "lib")),
    ):
        line = line.replace(place, here)
    log = tmp_path / "log"
    process = machines.start("relay", line.split(), log)
    try:
        host, port = url.removeprefix("http://").split(":")
        eventually(
            lambda: port_answers(host, int(port)),
            "the relay",
            hopeless=lambda: one_ended([process]),
            context=log.read_text,
        )
    finally:
        process.terminate()
        assert process.wait() == 0, log.read_text()
    assert (tmp_path / "lib" / "relay-local" / "spec.json").exists()


def test_the_readme_names_the_page() -> None:
    assert "docs/site.md" in (ROOT / "README.md").read_text()
