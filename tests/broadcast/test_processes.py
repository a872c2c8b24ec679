"""The commands as processes: started, killed at a bad moment, started again."""

from __future__ import annotations

import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from .conftest import Run, contents, weights
from .processes import COMMAND, Processes, broadcast


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    started = Processes(tmp_path)
    yield started
    started.end()


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


def test_served_bytes_survive_a_restart(run: Run, processes: Processes) -> None:
    run.publish(0, weights())
    counter = run.store / "served.json"
    total = sum(len(data) for data in weights().values())

    for start in (1, 2):
        origin = processes.start("origin", run.store, "--listen", "127.0.0.1:0")
        url = processes.url(origin)
        run.client(url, cache=f"cache-{start}").fetch(0, manifest_digest=None, deadline_s=10)
        origin.send_signal(signal.SIGTERM)
        assert origin.wait(10) == 0
        assert counter.read_text() == f'{{"bytes": {start * total}}}'


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


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["origin", "s", "--listen", "8080"], "'8080' is not HOST:PORT"),
        (
            ["fetch", "ftp://x", "--run", "demo", "--out", "o", "--public-key", "0" * 64],
            "not the URL",
        ),
        (
            ["fetch", "http://x", "--run", "demo", "--out", "o", "--public-key", "zz"],
            "--public-key",
        ),
    ],
)
def test_bad_arguments_are_one_message(tmp_path: Path, arguments: list[str], said: str) -> None:
    done = subprocess.run(
        [*COMMAND, *arguments], capture_output=True, text=True, timeout=60, cwd=tmp_path
    )
    assert done.returncode == 1
    assert said in done.stderr
    assert "Traceback" not in done.stderr
