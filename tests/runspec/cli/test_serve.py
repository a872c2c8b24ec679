"""`runspec serve`, `--follow` and `chat` without an engine: what is served, checked and shown."""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from broadcast.layout import manifest_name
from broadcast.manifest import WeightsManifest, sign_manifest
from runspec.cli import follow
from runspec.cli.follow import Follower, Versions
from runspec.cli.serve import _opening, link_files, print_reply, served, telling
from runspec.core.errors import UserError
from runspec.core.process import Move, Reply, encode
from runspec.core.run_files import weights_folder
from runspec.core.schema.load import load_resolved
from runspec.core.signed import SigningKey
from runspec.local.chat import Engine, Front
from runspec.local.model_folders import published_version
from sampler.tasks.prompts import PromptCodec
from tests.runspec.cli.in_process import runspec
from tests.runspec.cli.published import RUN, first_versions, flip_bit, publish_again, publish_run
from tests.runspec.local.fake_run import small_spec
from tests.waiting import eventually


@pytest.fixture(scope="module")
def complete(tmp_path_factory):
    """A run whose versions 0 to 3 are published."""
    return publish_run(tmp_path_factory.mktemp("published"), 4)


@pytest.fixture
def run_dir(complete, tmp_path):
    """A copy in which versions 0 and 1 are."""
    return first_versions(complete, tmp_path, 2)


def manifest_of(run_dir: Path, version: int) -> WeightsManifest:
    return published_version(run_dir, load_resolved(run_dir), version).manifest


@pytest.fixture
def versions(run_dir, tmp_path):
    """What finds the version after version 1."""
    (tmp_path / "own").mkdir()
    spec = load_resolved(run_dir)
    return Versions(run_dir, spec, manifest_of(run_dir, 1), tmp_path / "own")


def found(versions: Versions) -> int | None:
    checked = versions.next()
    return None if checked is None else checked[0].version


def test_names_say_whether_it_is_the_newest_and_only_that_is_followed(run_dir):
    runs, one = run_dir.parent, weights_folder(run_dir) / "v0"
    assert served(RUN, runs).names == (RUN, f"{RUN}@v1")
    assert served(f"{RUN}@0", runs).names == (f"{RUN}@v0",)
    assert served(str(one), runs).names == ("v0",)
    with pytest.raises(UserError, match="version 7 is not here"):
        served(f"{RUN}@7", runs)
    for what in (f"{RUN}@1", one):
        done = runspec("serve", what, "--follow", "--runs-dir", runs)
        assert done.returncode == 2
        assert "only the newest version of a run can be followed" in done.stderr


def test_tampered_files_are_refused_before_anything_starts(run_dir):
    flip_bit(weights_folder(run_dir) / "v1")
    done = runspec("serve", RUN, "--runs-dir", run_dir.parent)
    assert done.returncode == 1
    assert "not version 1 of small" in done.stderr and "Traceback" not in done.stderr


def test_a_served_prompt_opens_the_thinking_where_the_run_does(run_dir, tmp_path):
    link_files(weights_folder(run_dir) / "v1", folder := tmp_path / "model")
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text())
    path.unlink()  # a link

    def prompt(template: str, *opened: str) -> str:
        path.write_text(json.dumps({**config, "chat_template": template}))
        data = small_spec(RUN, 5, *opened).data
        return PromptCodec.read(folder, data).prompt_text("dog", 8)

    # given a run whose template does not open it
    opened = "data.think_prefill=true"
    trained = prompt("{% for m in messages %}{{ m['content'] }}{% endfor %}\n", opened)
    # then the template that vLLM is given does
    option, written = _opening(small_spec(RUN, 5, opened), folder)
    assert option == "--chat-template" and trained.endswith("<think>\n")
    assert prompt(Path(written).read_text()) == trained
    # and one that opens it stays
    assert _opening(small_spec(RUN, 5, opened), folder) == []


def test_a_command_says_what_it_waits_for_and_ends_with_its_server_a_failure_or_a_stop(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr("runspec.cli.serve.TELL_S", 0.0)
    (tmp_path / "log").write_text("out of memory")
    engine = Engine((RUN,), tmp_path / "vllm", None, thinks=False, opened=False, targets=())

    def answer(server: Any, stops: Any, follower: Any = None) -> int:
        vllm = follow._Vllm((RUN,), engine, server, tmp_path / "log", follower)
        at = ("127.0.0.1", 0)
        return asyncio.run(follow._answer(Front([engine]), at, "", [vllm], stops))

    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as server:
        assert answer(server, lambda: 1) == 0
        assert answer(server, lambda: "vLLM loads small: 0 s" in capsys.readouterr().out) == 0
        with pytest.raises(UserError, match="no more"):
            answer(server, lambda: 0, SimpleNamespace(error=UserError("no more")))
    with pytest.raises(UserError, match="the server ended with exit code 0\nout of memory"):
        answer(server, lambda: 0)


def test_the_newest_version_is_next_once_its_manifest_is_here(complete, run_dir, versions):
    assert versions.next() is None
    shutil.copytree(weights_folder(complete) / "v2", weights_folder(run_dir) / "v2")
    assert versions.next() is None
    publish_again(complete, run_dir, 3)
    checked = versions.next()
    assert checked is not None and checked[0] == manifest_of(complete, 3)
    # and its files stay where the publisher removes them
    shutil.rmtree(weights_folder(run_dir) / "v3")
    assert (checked[1] / "model.safetensors").is_file()


def test_a_tampered_version_is_refused_and_the_one_before_it_is_next(
    complete, run_dir, versions, capsys
):
    publish_again(complete, run_dir, 3, tampered=True)
    assert (versions.next(), versions.next()) == (None, None)
    [line] = capsys.readouterr().out.splitlines()
    assert line.startswith("version 3 is refused, version 1 stays: ")
    assert "not version 3 of small" in line
    publish_again(complete, run_dir, 2)
    assert found(versions) == 2
    # when its files come as they were published, then it is taken after all
    flip_bit(weights_folder(run_dir) / "v3")
    assert found(versions) == 3
    assert capsys.readouterr().out == ""


def test_a_stranger_and_another_tokenizer_are_refused(complete, run_dir, versions, capsys):
    publish_again(complete, run_dir, 2)
    signed = sign_manifest(manifest_of(complete, 2), SigningKey.generate())
    (run_dir / "store" / "origin" / manifest_name(RUN, 2)).write_bytes(signed)
    assert versions.next() is None
    assert "version 2 cannot be believed" in capsys.readouterr().out
    objects = dict(versions.manifest.objects)
    objects["tokenizer.json"] = replace(objects["tokenizer.json"], blake3="0" * 64)
    versions.manifest = replace(versions.manifest, objects=objects)
    publish_again(complete, run_dir, 3)
    assert versions.next() is None
    assert "its config or tokenizer differs" in capsys.readouterr().out


def test_after_a_rollback_an_older_version_is_next(complete, run_dir, versions):
    publish_again(complete, run_dir, 2)
    versions.manifest = manifest_of(complete, 2)
    assert versions.next() is None
    shutil.rmtree(weights_folder(run_dir) / "v2")
    shutil.rmtree((run_dir / "store" / "origin" / manifest_name(RUN, 2)).parent)
    assert found(versions) == 1


@contextmanager
def following(versions: Versions) -> Iterator[tuple[Follower, Any]]:
    """A follower, and the server's end of its socket as a file."""
    ours, servers = socket.socketpair()
    with closing(ours), closing(servers), servers.makefile("rwb", buffering=0) as file:
        follower = Follower(versions, ours, 0.01)
        follower.start()
        try:
            yield follower, file
        finally:
            follower.end()
            follower.join()
            follower._lines.close()


def test_a_server_that_is_busy_is_asked_again(
    complete, run_dir, versions, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(follow, "POLL_S", 0.01)
    publish_again(complete, run_dir, 2)
    with following(versions) as (follower, server):
        server.write(encode(Reply(1)))
        move = Move(**json.loads(server.readline()))
        server.write(encode(Reply(1, running=3)))
        again = Move(**json.loads(server.readline()))
        assert move == again == Move(2, str(run_dir.parent / "own" / "v2"))
        server.write(encode(Reply(2)))
        eventually(lambda: versions.manifest.version == 2, "it knows what is served")
        # then only what is served has files
        publish_again(complete, run_dir, 3)
        assert Move(**json.loads(server.readline())).version == 3
        server.write(encode(Reply(3)))
        eventually(lambda: versions.manifest.version == 3, "it knows what is served")
        assert [path.name for path in (run_dir.parent / "own").iterdir()] == ["v3"]
        assert follower.error is None
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].startswith("version 2 waits: 3 requests did not end within 0.01 s")
    assert printed[1:] == ["version 2 is served", "version 3 is served"]


def test_a_server_that_holds_no_version_ends_the_command(versions):
    with following(versions) as (follower, server):
        server.write(encode(Reply(1, error="RuntimeError: out of memory")))
        eventually(lambda: follower.error is not None, "the error is here")
        assert "a version cannot be loaded: RuntimeError: out of memory" in str(follower.error)


def test_thinking_is_dim_and_what_cannot_be_printed_is_not(capsys):
    pieces = [("so \x1b[31m", 1), ("long</th", 2), ("ink>pots", 3), ("\n", 4)]
    assert print_reply(iter(pieces), dim=True) == 4
    shown = capsys.readouterr().out
    assert shown == "\033[2mso ?[31mlong</think>\033[0mpots\n\033[0m"
    print_reply(iter(pieces), dim=False)
    assert capsys.readouterr().out == "so ?[31mlong</think>pots\n"


def test_who_waits_for_a_model_to_load_is_told_every_ten_seconds(tmp_path, monkeypatch, capsys):
    # given a server that logs, and a clock
    log, times = tmp_path / "0.log", iter((100.0, 105.0, 111.0, 112.0))
    clock = SimpleNamespace(**{**vars(time), "monotonic": lambda: next(times)})
    monkeypatch.setattr("runspec.cli.serve.time", clock)
    tell = telling("small@v5", log)
    for line in ("", "loading \x1b[2J shards", ""):
        log.write_text(line)
        assert tell() == 0
    # then its newest line is shown, as text
    assert capsys.readouterr().err == "loading small@v5 for 11 s: loading ?[2J shards\n"
