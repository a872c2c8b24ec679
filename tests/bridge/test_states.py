"""Full states for strangers: published once their steps are settled, and trained again from a link.

What a replay finds is in `tests/learner_jax/test_replay.py`.
"""

from __future__ import annotations

import io
import logging
import re
import subprocess
import sys
import tarfile
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from bridge import fetched_states
from bridge.fetched_states import PublishedStates, unpack
from bridge.publisher import Publisher, publish_versions
from bridge.states import StatePublisher, tar_pieces
from broadcast.layout import states_run, stored_versions
from broadcast.relay import run_origin
from learner_jax.train import train
from runspec.cli.watch import watch_command
from runspec.core import roles
from runspec.core.errors import UserError
from runspec.core.run_files import numbered, state_folder, step_folder
from runspec.core.signed import SigningKey
from tests.broadcast.conftest import Served
from tests.learner_jax import test_document_runs as documents
from tests.learner_jax.conftest import Run, tiny_spec
from tests.learner_jax.test_runner import ready_run
from tests.waiting import eventually
from verify.__main__ import main as verify
from verify.formats.findings import open_finding

pytestmark = pytest.mark.slow
LOG = logging.getLogger("test")
AUDITED: dict[str, Any] = {
    "audit": {"states": 2},
    "checkpoints": {"every": 1, "keep": 1},
    "storage": {"rollouts": 1},
}


def publisher(run: Run) -> StatePublisher:
    signing = Publisher(run.path, run.spec, LOG).signing
    return StatePublisher(run.path, run.spec, signing, LOG)


def published(run: Run) -> list[int]:
    return stored_versions(run.path / "store" / "origin", states_run(run.spec.name))


def states(run: Run) -> list[int]:
    return numbered(state_folder(run.path, run.spec), "step_")


def trained(run: Run) -> Run:
    """The run after its last step, while a publisher was at work."""
    stop, versions = threading.Event(), Publisher(run.path, run.spec, LOG)
    publishing = threading.Thread(target=publish_versions, args=(versions, stop))
    publisher(run).publish_new()
    with publisher(run).following(stop):
        publishing.start()
        train(run.path, LOG, threading.Event())
        last = run.path / "weights" / f"v{run.spec.steps}"
        eventually(last.exists, "the last version is published")
    publishing.join()
    return run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return trained(ready_run(tmp_path_factory.mktemp("run") / "runs" / "run", **AUDITED))


def seen(link: str, run: Run, folder: Path) -> PublishedStates:
    url, root = link.partition("/#")[0], run.root.public_hex
    return PublishedStates([url], run=run.spec.name, root_public_key=root, folder=folder)


@pytest.fixture
def origin() -> Iterator[Callable[[Run], str]]:
    """Serves a run's store, and gives the link under which it is found."""
    with ExitStack() as stack:

        def serve(run: Run) -> str:
            store = run.path / "store" / "origin"
            served = Served(lambda started: run_origin(store, log=LOG, started=started))
            stack.callback(served.stop)
            return f"{served.url}/#run={run.spec.name}&root={run.root.public_hex}"

        yield serve


def replayed(link: str, what: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "verify", "audit", link, "--replay", what]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_a_stranger_with_the_link_alone_trains_every_interval_again(run, origin):
    # given a run of four steps, whose full states of versions 0, 2 and 4 are published
    assert published(run) == [0, 2, 4]
    # when somebody has nothing but its link
    done = replayed(origin(run), "0-4")
    # then every bit comes out again, of states and of published policy versions
    said = "steps {}: equal, every bit of the state after them"
    assert done.stdout.splitlines() == [said.format("0 to 1"), said.format("2 to 3")], done.stderr
    assert done.returncode == 0


def test_a_watcher_signs_what_came_of_what_it_drew_and_readers_trust_keys(
    run, origin, tmp_path, monkeypatch, capsys
):
    # given a watcher, and what comes of two intervals (how: the test before)
    came = {2: ("equal", "all"), 4: ("refuted", "NOT \x1b[2J")}
    served = []

    def replayed(_: PublishedStates, __: int, last: int) -> tuple[str, str]:
        if at := re.search(r"findings at (\S+)/v1/findings", capsys.readouterr().out):
            served.append(f"http://{at[1]}")
        assert not served or verify(["findings", *served]) == 0
        return came[last]

    monkeypatch.setattr(fetched_states, "replay_published", replayed)
    link, key, out = origin(run), tmp_path / "my.key", tmp_path / "out"
    # when it draws none, nothing is trained; when it draws all, a refutation is its exit code
    assert watch_command(link, key, share=0.0, folder=out, once=True) == 0 and not out.exists()
    drawn = {"share": 1.0, "folder": out, "once": True, "serve": "127.0.0.1:0"}
    assert watch_command(link, key, **drawn) == 1
    # then it served the first while it trained the second, and says that nobody takes them
    said = capsys.readouterr().out
    assert served and ", equal: all" in said and "2 findings lie here alone" in said
    # then there is a signed finding of each, which names the two states
    found, signer = open_finding((out / "2-4.json").read_bytes())
    assert (found.first, found.last, found.outcome, found.share) == (2, 4, "refuted", 1.0)
    assert signer == SigningKey.load(key).public_hex
    with seen(link, run, tmp_path / "seen") as known:
        known.look()
        assert found.manifests == [known.history[number].manifest for number in (2, 4)]
    # and a reader tells keys that it trusts from others, and prints no control characters
    files = ["findings", *map(str, sorted(out.glob("*.json")))]
    assert verify(files) == 0
    assert "0 steps checked by keys that you trust, 4 more" in capsys.readouterr().out
    assert verify([*files, "--trust", signer]) == 1
    said = capsys.readouterr().out
    assert "4 steps checked by keys that you trust, 0 more" in said and "\x1b" not in said
    # and what nobody signed is no finding
    (out / "2-4.json").write_bytes(b"{}")
    assert verify(files) == 2


def test_documents_are_published_with_the_states(tmp_path, origin):
    (tmp_path / "files").mkdir()
    files = documents.make_files(tmp_path / "files")
    run = trained(documents.ready_run(tmp_path / "runs" / "run", files, blocks=AUDITED))
    link = origin(run)
    # when documents and tokenizer are not where the spec says
    files.rename(files.with_name("elsewhere"))
    done = replayed(link, "1")
    said = ["steps 0 to 1: equal, every bit of the state after them"]
    assert done.stdout.splitlines() == said, done.stderr


def add_state(run: Run, step: int) -> None:
    """Some files where the learner writes a full state; the publisher does not look into them."""
    folder = state_folder(run.path, run.spec) / f"step_{step}" / "state" / "d"
    folder.mkdir(parents=True)
    (folder / "0").write_bytes(bytes([step]) * 1000)


def test_a_state_is_published_once_its_leases_are_settled(tmp_path):
    # given a run whose steps train rollouts of up to two versions before
    run = ready_run(tmp_path / "runs" / "run", batches=range(2), **AUDITED)
    states_of = publisher(run)
    # then version 0 is published at once, and the state of version 2 when step 3 is closed
    assert states_of.publish_new() == [0]
    add_state(run, 1)
    add_state(run, 2)
    run.add_step(2, version=1)
    assert states_of.publish_new() == []
    run.add_step(3, version=2)
    assert states_of.publish_new() == [2] and states_of.publish_new() == []
    # and a publisher that starts again goes on from there
    assert publisher(run).publish_new() == []


def test_the_learner_keeps_what_is_still_to_be_published(tmp_path):
    # given a run that keeps one full state and the rollouts of one step, and no publisher
    run = ready_run(tmp_path / "runs" / "run", **AUDITED)
    publisher(run).publish_new()
    train(run.path, LOG, threading.Event())
    # then the states that are to be published stay, and all rollouts
    assert states(run) == [2, 4]
    assert all(any(step_folder(run.path, s).glob("*.safetensors")) for s in range(4))
    assert publisher(run).publish_new() == [2, 4]


def test_steps_whose_records_are_gone_belong_to_no_interval(tmp_path, origin):
    run = ready_run(tmp_path / "runs" / "run", **AUDITED)
    publisher(run).publish_new()
    add_state(run, 2)
    add_state(run, 4)
    # given a run that lost rollouts of its first steps before they were published
    for path in step_folder(run.path, 0).glob("*.safetensors"):
        path.unlink()
    assert publisher(run).publish_new() == [2, 4]
    # then strangers know of the steps after the loss
    with seen(origin(run), run, tmp_path) as known:
        assert known.look() == [(2, 4)] and list(known.history) == [0, 2, 4]


def test_a_store_keeps_so_many_states_and_serves_them_after_the_run(tmp_path, origin, monkeypatch):
    monkeypatch.setattr(roles, "VALID_S", 0.0)  # of a run that ended so long ago
    run = ready_run(tmp_path / "runs" / "run", **AUDITED | {"audit": {"states": 1, "keep": 2}})
    publisher(run).publish_new()
    for step in range(1, 5):
        add_state(run, step)
    assert publisher(run).publish_new() == [1, 2, 3, 4]
    assert published(run) == [3, 4]
    with seen(origin(run), run, tmp_path) as known:
        assert known.look() == [(3, 4)] and list(known.history) == [0, 1, 2, 3, 4]


def test_a_state_that_is_published_twice_is_found(run, tmp_path, origin):
    with seen(origin(run), run, tmp_path) as known:
        # given a stranger who knows another manifest of version 2 than the newest state names
        assert known.look() == [(0, 2), (2, 4)]
        known.history[2] = known.history.pop(4)
        # then what follows is refused
        with pytest.raises(UserError, match="the full state of version 2 was published twice"):
            known.look()


def test_a_run_without_states_or_a_link_without_root_is_said(tmp_path, origin):
    run = ready_run(tmp_path / "runs" / "run")
    (run.path / "store" / "origin").mkdir(parents=True)
    link = origin(run)
    assert "names no run or no root key" in replayed(link.partition("#")[0], "1").stderr
    with seen(link, run, tmp_path) as known, pytest.raises(UserError, match="nobody serves full"):
        known.look()
    ledger = subprocess.run(
        [sys.executable, "-m", "verify", "audit", link], capture_output=True, text=True, check=False
    )
    assert (ledger.returncode, "give --replay alone" in ledger.stderr) == (2, True)


@pytest.mark.parametrize(
    ("audit", "changes", "words"),
    [
        ({"states": 3}, {"checkpoints": {"every": 2}}, "multiple of 2"),
        ({"states": 2}, {"checkpoints": {"every": 2, "dir": "s3://b/f"}}, "that is a path"),
        ({"states": 2, "keep": 1}, {}, "greater than or equal to 2"),
    ],
)
def test_settings_that_cannot_be_published_are_refused(audit, changes, words):
    with pytest.raises(ValueError, match=words):
        tiny_spec(audit=audit, **changes)


# -- Archives --------------------------------------------------------------------------------------


def test_an_archive_gives_its_files_again(tmp_path):
    file = tmp_path / "file"
    file.write_bytes(b"x" * 1000)
    long = "rollouts/" + "y" * 150
    pieces = b"".join(tar_pieces({"a/b": b"1", long: file}))
    assert pieces == b"".join(tar_pieces({"a/b": b"1", long: file}))
    (tmp_path / "t.tar").write_bytes(pieces)
    unpack(tmp_path / "t.tar", tmp_path / "out")
    assert (tmp_path / "out/a/b").read_bytes() == b"1"
    assert (tmp_path / "out" / long).read_bytes() == file.read_bytes()


def member(name: str, **changes: Any) -> bytes:
    info = tarfile.TarInfo(name)
    for field, value in changes.items():
        setattr(info, field, value)
    return info.tobuf() + b"\0" * 1024


@pytest.mark.parametrize(
    "archive",
    [
        member("../outside"),
        member("link", type=tarfile.SYMTYPE, linkname="/etc/passwd"),
        member("hard", type=tarfile.LNKTYPE, linkname="../x"),
        member("pipe", type=tarfile.FIFOTYPE),
        member("sparse", type=tarfile.GNUTYPE_SPARSE),
        member("short", size=4096),
        b"no archive at all" * 100,
    ],
)
def test_a_hostile_archive_is_refused_and_writes_nothing_elsewhere(tmp_path, archive):
    (tmp_path / "t.tar").write_bytes(archive)
    folder = tmp_path / "in" / "folder"
    with pytest.raises(UserError, match="not an archive of plain files"):
        unpack(tmp_path / "t.tar", folder)
    assert {path.name for path in tmp_path.iterdir()} <= {"t.tar", "in"}
    assert [path for path in (tmp_path / "in").rglob("*") if path.is_symlink()] == []


def test_archives_need_no_decompression(tmp_path):
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        archive.addfile(tarfile.TarInfo("a"))
    (tmp_path / "t.tar").write_bytes(packed.getvalue())
    with pytest.raises(UserError, match="not an archive"):
        unpack(tmp_path / "t.tar", tmp_path / "out")
