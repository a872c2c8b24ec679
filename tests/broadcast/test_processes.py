"""The commands as processes: started, killed at a bad moment, started again."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from bridge.delta import write_delta
from broadcast.__main__ import main

from .conftest import Run, contents, weights
from .model_versions import ModelVersions
from .processes import Processes, broadcast

pytestmark = pytest.mark.slow


def test_keygen_publish_origin_relay_fetch(tmp_path: Path, processes: Processes) -> None:
    keys, files, store, out = (tmp_path / name for name in ("keys", "files", "store", "out"))
    files.mkdir()
    for name, data in weights().items():
        (files / name).write_bytes(data)

    made = broadcast("keygen", keys, "--run", "demo")
    root = made.stdout.strip()
    assert (keys / "root.pub").read_text().strip() == root
    published = broadcast(
        "publish", store, files, "--run", "demo", "--version", 7, "--key", keys / "publisher.key"
    )
    assert published.returncode == 0, published.stderr
    origin = processes.start("origin", store, "--listen", "127.0.0.1:0")
    relay = processes.start(
        *("relay", "--run", "demo", "--upstream", processes.url(origin)),
        *("--store", tmp_path / "relay", "--listen", "127.0.0.1:0", "--public-key", root),
    )
    url = processes.url(relay)
    common = ("--run", "demo", "--out", out, "--public-key", keys / "root.pub", "--deadline", 20)

    fetched = broadcast("fetch", url, *common)
    assert (fetched.returncode, fetched.stdout.strip()) == (0, str(out / "v7")), fetched.stderr
    assert contents(out / "v7") == weights()
    assert broadcast("fetch", url, *common, "--version", 7).returncode == 0

    for server in (relay, origin):
        server.send_signal(signal.SIGTERM)
        assert server.wait(10) == 0


def test_a_delta_travels_over_servers_that_ask_for_tokens(
    run: Run, processes: Processes, tmp_path: Path
) -> None:
    # given two versions, the second published as a delta only
    versions = ModelVersions(run)
    for version in (0, 1):
        versions.write(version)
    write_delta(versions.directory(0), versions.directory(1), versions.directory(1) / "delta")
    said = ("--run", "demo", "--key", run.keys / "publisher.key", "--version")
    based = (1, "--base", 0, "--delta-only")
    assert broadcast("publish", run.store, versions.directory(0), *said, 0).returncode == 0
    published = broadcast("publish", run.store, versions.directory(1), *said, *based)
    assert published.returncode == 0, published.stderr

    # and an origin and a relay, each of which knows its readers
    for name in ("relay", "sampler"):
        (tmp_path / name).write_text(f"the-secret-of-the-{name}\n")
        (tmp_path / f"{name}s").write_text(f"{name}-1 the-secret-of-the-{name}\n")
    listen = ("--listen", "127.0.0.1:0", "--rate-limit", "500MB/s", "--max-connections", 100)
    origin = processes.start("origin", run.store, *listen, "--token-file", tmp_path / "relays")
    relay = processes.start(
        *("relay", "--run", "demo", "--upstream", processes.url(origin), *listen),
        *("--store", run.folder / "relay", "--public-key", run.root, "--max-bytes", "1GB"),
        *("--token-file", tmp_path / "samplers", "--upstream-token-file", tmp_path / "relay"),
    )

    # when a sampler fetches both, then it has them, and without a token nothing
    out = run.folder / "out"
    fetch = ("fetch", processes.url(relay), "--run", "demo", "--out", out, "--public-key", run.root)
    for version in (0, 1):
        named = ("--version", version, "--deadline", 20, "--token-file", tmp_path / "sampler")
        done = broadcast(*fetch, *named)
        assert done.returncode == 0, done.stderr
        assert contents(out / f"v{version}") == versions.files(version)
    assert "version 1 fetched from held version 0 and deltas 1" in done.stderr
    refused = broadcast(*fetch, "--deadline", 0.5, "--out", tmp_path / "nothing")
    assert refused.returncode == 1 and "401" in refused.stderr


HALF_APPLIED = """
import os, signal, sys
import bridge.delta
from broadcast.__main__ import main

apply_deltas = bridge.delta.apply_deltas

def kill_in_the_middle(directory, deltas, tensors):
    weights = directory / "model.safetensors"
    before = weights.read_bytes()
    apply_deltas(directory, deltas, tensors)
    half = len(before) // 2
    weights.write_bytes(weights.read_bytes()[:half] + before[half:])
    os.kill(os.getpid(), signal.SIGKILL)

bridge.delta.apply_deltas = kill_in_the_middle
sys.exit(main(sys.argv[1:]))
"""
"""`python -m broadcast`, killed when the deltas are in one half of the weights."""


@pytest.mark.parametrize(
    ("joiner", "damaged"), [(True, False), (True, True), (False, False)], ids=str
)
def test_a_client_killed_while_it_applies_deltas_goes_on_from_there(
    run: Run, processes: Processes, joiner: bool, damaged: bool
) -> None:
    # given a client that was killed with the files of version 0 half turned into version 2
    versions = ModelVersions(run)
    versions.publish(0)
    versions.publish(1, base=0)
    versions.publish(2, base=1)
    server, out = run.static(), run.folder / "out"
    fetch = ("fetch", server.url, "--run", "demo", "--out", out, "--public-key", run.root)
    if not joiner:
        assert broadcast(*fetch, "--version", 0).returncode == 0
    client = processes.start(*fetch, "--version", 2, command=(sys.executable, "-c", HALF_APPLIED))
    assert client.wait(30) == -signal.SIGKILL
    left = out / ".partial-v2" / "model.safetensors"
    assert left.read_bytes() != versions.files(2)["model.safetensors"]
    if damaged:
        left.write_bytes(left.read_bytes()[:-1] + b"?")
    server.paths.clear()

    # when it is started again
    again = broadcast(*fetch, "--deadline", 20)

    # then the version is right; nothing comes again, but the files that turned out to be wrong
    assert again.returncode == 0, again.stderr
    assert contents(out / "v2") == versions.files(2)
    assert ("what a killed fetch left" in again.stderr) == damaged
    assert server.asked() == (21 if damaged else 0)
    assert joiner or contents(out / "v0") == versions.files(0)
    assert sorted(path.name for path in out.glob(".[pd]*")) == []


@pytest.mark.parametrize("role", ["origin", "relay"])
def test_a_taken_port_is_named(run: Run, role: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        address = f"127.0.0.1:{holder.getsockname()[1]}"
        relay = ("--run", "demo", "--upstream", "http://127.0.0.1:1", "--public-key", run.root)
        arguments = (run.store,) if role == "origin" else (*relay, "--store", run.store)

        done = broadcast(role, *arguments, "--listen", address)

    assert done.returncode == 1
    assert f"{address}: the port is taken" in done.stderr
    assert "Traceback" not in done.stderr


FETCH = ["--run", "demo", "--out", "o", "--public-key"]
ORIGIN = ["origin", "s", "--listen", "127.0.0.1:0"]
RELAY = ["relay", "--run", "demo", "--upstream", "http://x", "--store", "s", "--public-key", "zz"]
PUBLISH = ["publish", "s", "d", "--run", "demo", "--version", "1", "--key", "k"]


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["origin", "s", "--listen", "8080"], 1, "'8080' is not HOST:PORT"),
        (["fetch", "ftp://x", *FETCH, "0" * 64], 1, "not the URL"),
        (["fetch", "http://x", *FETCH, "zz"], 1, "--public-key"),
        ([*PUBLISH, "--delta-only"], 1, "--delta-only needs --base"),
        (["fetch", "x", "--deadline", "soon"], 2, "--deadline: 'soon' is not a number of seconds"),
        (["fetch", "x", "--deadline", "nan"], 2, "--deadline: 'nan' is not"),
        (["fetch", "x", "--deadline", "-1"], 2, "--deadline: '-1' is not"),
        (["fetch", "x", "--version", "newest"], 2, "--version: 'newest' is not a number from 0 on"),
        ([*ORIGIN, "--rate-limit", "1000"], 2, "--rate-limit: "),
        ([*ORIGIN, "--rate-limit", "0MB/s"], 2, "--rate-limit: a rate above zero was expected"),
        ([*ORIGIN, "--max-connections", "0"], 2, "--max-connections: at least 1 is needed"),
        ([*RELAY, "--max-bytes", "12"], 2, "--max-bytes: "),
        ([*RELAY, "--keep-versions", "0"], 2, "--keep-versions: at least 1 is needed"),
    ],
)
def test_bad_arguments_are_one_message(
    arguments: list[str],
    code: int,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    try:
        ended = main(arguments)
    except SystemExit as stopped:
        ended = stopped.code

    assert ended == code
    error = capsys.readouterr().err
    assert said in error and "Traceback" not in error


SLOW_NAMES = """
import socket, sys, threading
known = socket.getaddrinfo
def getaddrinfo(host, *rest, **named):
    if host == "slow.invalid":  # as where no name server answers, only longer
        threading.Event().wait(600)
    return known(host, *rest, **named)
socket.getaddrinfo = getaddrinfo
from broadcast.__main__ import main
sys.exit(main(sys.argv[1:]))
"""


def test_a_name_that_is_looked_up_for_ever_keeps_no_process(run: Run, processes: Processes) -> None:
    url = "http://slow.invalid:1"
    common = ("--run", "demo", "--public-key", run.root)
    command = (sys.executable, "-c", SLOW_NAMES)
    # a fetch ends at its deadline
    fetch = (*command, "fetch", url, *common, "--out", run.folder / "out", "--deadline", "0.5")
    ended = subprocess.run([*map(str, fetch)], capture_output=True, text=True, timeout=30)
    assert ended.returncode == 1 and url in ended.stderr
    # and a relay when it is told to
    relay = processes.start(
        *("relay", *common, "--upstream", url, "--store", run.folder / "relay"),
        *("--listen", "127.0.0.1:0"),
        command=command,
    )
    processes.url(relay)
    relay.terminate()
    assert relay.wait(timeout=30) == 0
