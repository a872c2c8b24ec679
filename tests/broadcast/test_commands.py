"""`python -m broadcast`: the commands, together as processes, and killed at a bad moment."""

from __future__ import annotations

import signal
import socket
import threading

import pytest

from bridge.delta import write_delta
from broadcast.__main__ import main
from tests.broadcast.conftest import (
    CHUNK_BYTES,
    PATIENCE_S,
    ModelVersions,
    Run,
    contents,
    fetched,
    intact,
    weights,
)
from tests.broadcast.fake_relay import silent
from tests.waiting import eventually

pytestmark = pytest.mark.slow

CHUNKS = 22


def ended(*arguments: object) -> int | str | None:
    """The exit code of a command, run in this process."""
    try:
        return main([str(argument) for argument in arguments])
    except SystemExit as stopped:
        return stopped.code


def relay(run: Run, upstream: str, *more: object) -> list[object]:
    said = ["relay", "--run", "demo", "--upstream", upstream, "--store", run.folder / "relay"]
    return [*said, "--listen", "127.0.0.1:0", "--public-key", run.root, *more]


def test_a_delta_travels_over_servers_that_ask_for_tokens(run, processes, tmp_path, capsys):
    # given keys and two versions, the second published as a delta only
    keys, store, versions = tmp_path / "keys", run.store, ModelVersions(run)
    assert ended("keygen", keys, "--run", "demo") == 0
    run.root = capsys.readouterr().out.strip()
    assert (keys / "root.pub").read_text().strip() == run.root
    directories = [versions.write(version) for version in (0, 1)]
    write_delta(*directories, directories[1] / "delta")
    publish = ("--run", "demo", "--key", keys / "publisher.key", "--version")
    assert ended("publish", store, directories[0], *publish, 0) == 0
    based = (1, "--base", 0, "--delta-only")
    (keys / "roles.json").unlink()  # then the store's is taken
    assert ended("publish", store, directories[1], *publish, *based) == 0
    assert len(capsys.readouterr().out.split()[-1]) == 64
    # and an origin and a relay, each of which knows its readers
    for name in ("relay", "sampler"):
        (tmp_path / name).write_text(f"the-secret-of-the-{name}\n")
        (tmp_path / f"{name}s").write_text(f"{name}-1 the-secret-of-the-{name}\n")
    limits = ("--rate-limit", "500MB/s", "--max-connections", 100)
    secured = ("--token-file", tmp_path / "relays", *limits)
    origin = processes.start("origin", store, "--listen", "127.0.0.1:0", *secured)
    secured = ("--token-file", tmp_path / "samplers", "--upstream-token-file", tmp_path / "relay")
    started = relay(run, processes.url(origin), *secured, *limits, "--max-bytes", "1GB")
    between = processes.start(*started)
    # when a sampler fetches both, then it has them, and without a token nothing
    out = run.folder / "out"
    fetch = ("fetch", processes.url(between), "--run", "demo", "--out", out, "--public-key")
    token = ("--token-file", tmp_path / "sampler")
    for version in (0, "latest"):
        assert ended(*fetch, keys / "root.pub", *token, "--version", version) == 0
    assert capsys.readouterr().out.split() == [str(out / "v0"), str(out / "v1")]
    assert [contents(out / f"v{n}") for n in (0, 1)] == [versions.files(n) for n in (0, 1)]
    assert ended(*fetch, run.root, "--deadline", 0.5, "--out", tmp_path / "nothing") == 1
    # and the servers end when they are told to
    for server in (between, origin):
        server.send_signal(signal.SIGTERM)
        assert server.wait(PATIENCE_S) == 0


@pytest.mark.parametrize("who", ["client", "relay"])
def test_a_process_killed_in_the_middle_fetches_what_is_missing(run, processes, who):
    # given a process that has ten of 22 chunks when it is killed
    files = weights(CHUNKS * CHUNK_BYTES - 500)
    run.publish(0, files)
    names, out = {chunk.blake3 for chunk in run.weights_chunks()}, run.folder / "out"

    def here() -> set[str]:
        if who == "relay":
            return {path.name for path in run.chunks("relay")} & names
        return set(intact(run, out / ".partial-v0" / "model.safetensors"))

    def arguments(url: str) -> list[object]:
        fetch = ["fetch", url, "--run", "demo", "--out", out, "--public-key", run.root]
        return relay(run, url) if who == "relay" else fetch

    first, second = run.static(), run.static()
    had = {chunk.blake3 for chunk in run.weights_chunks()[:10]}
    for name in names - had:
        first.answer(name, silent)
    process = processes.start(*arguments(first.url))
    eventually(lambda: here() == had, "ten chunks of weights are on disk")
    if who == "relay":  # a client that knows another server too finishes there
        both = run.client(processes.url(process), run.static().url, cache="both")
        process.kill()
        assert fetched(both) == files
    process.kill()
    process.wait()
    # when it is started again, then it asks for what is missing, and for nothing else
    again = processes.start(*arguments(second.url))
    if who == "relay":
        assert fetched(run.client(processes.url(again))) == files
    else:
        assert again.wait(PATIENCE_S) == 0
        assert contents(out / "v0") == files and not (out / ".partial-v0").exists()
    assert {name for name in names if second.asked(name)} == names - had


@pytest.mark.parametrize("role", ["origin", "relay"])
def test_a_taken_port_is_named(run: Run, role: str, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        address = f"127.0.0.1:{holder.getsockname()[1]}"
        started = ["origin", run.store] if role == "origin" else relay(run, "http://127.0.0.1:1")
        assert ended(*started, "--listen", address) == 1
    error = capsys.readouterr().err
    assert f"{address}: the port is taken" in error and "Traceback" not in error
    assert ended("origin", run.store, "--listen", "192.0.2.1:80") == 1
    assert "192.0.2.1:80: cannot listen: Cannot assign" in capsys.readouterr().err


FETCH = ["--run", "demo", "--out", "o", "--public-key"]
ORIGIN = ["origin", "s", "--listen", "127.0.0.1:0"]
RELAY = ["relay", "--run", "demo", "--upstream", "http://x", "--store", "s", "--public-key", "zz"]
PUBLISH = ["publish", "s", "d", "--run", "demo", "--version", "1", "--key", "k"]


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["origin", "s", "--listen", "8080"], 1, "'8080' is not HOST:PORT"),
        (["fetch", "ftp://x", *FETCH, "0" * 64], 1, "not the URL"),
        (["fetch", "http://x", *FETCH, "zz"], 1, "--public-key: neither a key nor a file"),
        (["fetch", "http://x", *FETCH, "short"], 1, "short: holds no public key of 64"),
        ([*PUBLISH, "--delta-only"], 1, "--delta-only needs --base"),
        (PUBLISH, 1, "no roles.json here or at roles.json"),
        (["fetch", "x", "--deadline", "soon"], 2, "--deadline: 'soon' is not a number of seconds"),
        (["fetch", "x", "--deadline", "nan"], 2, "--deadline: 'nan' is not"),
        (["fetch", "x", "--deadline", "0"], 2, "--deadline: '0' is not"),
        (["fetch", "x", "--version", "newest"], 2, "--version: 'newest' is not a number from 0 on"),
        (["fetch", "x", "--version", "1" * 11], 2, "is not a number from 0 on"),
        ([*ORIGIN, "--rate-limit", "1000"], 2, "--rate-limit: "),
        ([*ORIGIN, "--rate-limit", "0MB/s"], 2, "--rate-limit: a rate above zero was expected"),
        ([*ORIGIN, "--max-connections", "0"], 2, "--max-connections: at least 1 is needed"),
        ([*RELAY, "--max-bytes", "12"], 2, "--max-bytes: "),
        ([*RELAY, "--keep-versions", "0"], 2, "--keep-versions: at least 1 is needed"),
    ],
)
def test_bad_arguments_are_one_message(arguments, code, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "short").write_text("0" * 63)
    assert ended(*arguments) == code
    error = capsys.readouterr().err
    assert said in error and "Traceback" not in error


def test_a_name_that_is_looked_up_for_ever_keeps_no_fetch(run, monkeypatch, capsys):
    looked_up, known = threading.Event(), socket.getaddrinfo

    def slow(host: str, *rest: object, **named: object) -> object:
        if host == "slow.invalid":  # as where no name server answers, only longer
            looked_up.wait(PATIENCE_S)
        return known(host, *rest, **named)

    monkeypatch.setattr(socket, "getaddrinfo", slow)
    fetch = ("fetch", "http://slow.invalid:1", "--run", "demo", "--out", run.folder / "out")
    assert ended(*fetch, "--public-key", run.root, "--deadline", 0.5) == 1
    assert "http://slow.invalid:1: " in capsys.readouterr().err
    looked_up.set()
