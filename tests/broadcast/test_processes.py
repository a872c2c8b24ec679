"""The commands as processes: started, killed at a bad moment, started again."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from broadcast.manifest import read_manifest
from runspec.common.hashing import digest_bytes
from tests.waiting import eventually

from .conftest import Run, contents, weights

COMMAND = [sys.executable, "-m", "broadcast"]


def broadcast(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [*COMMAND, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


class Processes:
    """Background processes of a test; none outlives it."""

    def __init__(self, log_folder: Path) -> None:
        self._folder = log_folder
        self._started: list[subprocess.Popen[bytes]] = []

    def start(self, *arguments: object) -> subprocess.Popen[bytes]:
        with self._log(len(self._started)).open("wb") as log:
            process = subprocess.Popen([*COMMAND, *map(str, arguments)], stdout=log, stderr=log)
        self._started.append(process)
        return process

    def url(self, process: subprocess.Popen[bytes]) -> str:
        """Where a started server listens."""
        log = self._log(self._started.index(process))
        form = re.compile(r"listening on (http://\S+)")
        eventually(lambda: form.search(log.read_text()) is not None, "the server listens")
        found = form.search(log.read_text())
        assert found
        return found[1]

    def end(self) -> None:
        for process in self._started:
            process.kill()
            process.wait()

    def _log(self, number: int) -> Path:
        return self._folder / f"process-{number}.log"


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


def test_a_killed_client_keeps_what_it_has(run: Run, processes: Processes) -> None:
    run.publish(0, weights(21_500))
    server = run.static()
    release = threading.Event()

    def ten_chunks_then_silence(path: str) -> None:
        if server.chunk_requests() > 10:
            release.wait(30)

    server.before = ten_chunks_then_silence
    out = run.folder / "out"
    fetch = ("fetch", server.url, "--run", "demo", "--out", out, "--public-key", run.root)
    client = processes.start(*fetch)
    chunks = (
        read_manifest(run.store / "demo" / "versions" / "0").objects["model.safetensors"].chunks
    )
    partial = out / ".partial-v0" / "model.safetensors"

    def on_disk() -> int:
        data = partial.read_bytes() if partial.exists() else b""
        pieces = [data[i * 1000 : (i + 1) * 1000] for i in range(len(chunks))]
        return sum(digest_bytes(p) == c.blake3 for p, c in zip(pieces, chunks, strict=True))

    eventually(lambda: on_disk() >= 9, "nine of 22 chunks of weights are on disk")
    client.kill()
    client.wait()
    had = on_disk()
    server.before = lambda path: None
    release.set()
    server.paths.clear()

    again = broadcast(*fetch, "--deadline", 20)

    assert again.returncode == 0, again.stderr
    assert contents(out / "v0") == weights(21_500)
    wanted = {path.rpartition("/")[2] for path in server.paths if "/chunks/" in path}
    assert len(wanted & {c.blake3 for c in chunks}) == len(chunks) - had


def test_a_relay_killed_in_the_middle_is_replaced_and_resumes(
    run: Run, processes: Processes
) -> None:
    run.publish(0, weights(21_500))
    upstream = run.static()
    release = threading.Event()

    def ten_chunks_then_silence(path: str) -> None:
        if upstream.chunk_requests() > 10:
            release.wait(30)

    upstream.before = ten_chunks_then_silence
    start_relay = (
        *("relay", "--run", "demo", "--upstream", upstream.url, "--store", run.folder / "relay"),
        *("--listen", "127.0.0.1:0", "--public-key", run.root),
    )
    first = processes.start(*start_relay)
    second = run.static()
    client = run.client(processes.url(first), second.url)
    eventually(lambda: (run.folder / "relay/demo/chunks").is_dir(), "chunks arrive")
    eventually(lambda: len(run.chunks("relay")) >= 9, "nine chunks are at the relay")

    first.kill()
    first.wait()
    had = len([p for p in run.chunks("relay") if not p.name.startswith(".")])
    path = client.fetch(0, manifest_digest=None, deadline_s=20)
    assert contents(path) == weights(21_500)

    upstream.before = lambda path: None
    release.set()
    upstream.paths.clear()
    again = processes.start(*start_relay)
    through = run.client(processes.url(again), cache="through")
    assert contents(through.fetch(0, manifest_digest=None, deadline_s=20)) == weights(21_500)
    assert upstream.chunk_requests() == 23 - had


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


def test_a_full_disk_leaves_nothing_under_the_final_name(run: Run, tmp_path: Path) -> None:
    """The kernel's limit on file sizes stands in for the full disk: the same failed write()."""
    run.publish(0, weights(50_000))
    out = tmp_path / "out"
    limited = (
        "import resource, sys; from broadcast.__main__ import main; "
        "resource.setrlimit(resource.RLIMIT_FSIZE, (20000, 20000)); sys.exit(main(sys.argv[1:]))"
    )
    arguments = ["fetch", run.static().url, "--run", "demo", "--out", out, "--public-key", run.root]

    done = subprocess.run(
        [sys.executable, "-c", limited, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=60,
    )

    assert done.returncode == 1
    assert "cannot write version 0: File too large" in done.stderr
    assert not (out / "v0").exists()


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
