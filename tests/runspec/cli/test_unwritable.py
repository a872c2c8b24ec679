"""A folder that cannot be written is named with its reason, before a role is started."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from runspec.core import object_store
from tests.harness import ROOT, TARGET_SHORT
from tests.object_store import s3_server
from tests.runspec.cli.in_process import runspec
from tests.runspec.local.fake_run import prepared, small_spec
from tests.waiting import DEADLINE_S

pytestmark = pytest.mark.slow

SPEC = (TARGET_SHORT, "--profile", "laptop", "--set", "name=small")
Bound = Callable[..., CompletedProcess[str]]


@pytest.fixture
def bound() -> Bound:
    """Runs `runspec` as a user whom permissions bind."""
    setpriv = shutil.which("setpriv")
    if os.geteuid() == 0 and setpriv is None:
        pytest.skip("needs setpriv to drop root's capabilities")
    dropped = [setpriv, "--bounding-set=-all", "--inh-caps=-all"] if os.geteuid() == 0 else []

    def run(*words: str | Path) -> CompletedProcess[str]:
        command = [*dropped, sys.executable, "-m", "runspec", *map(str, words)]
        return subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=4 * DEADLINE_S
        )

    return run


def refused(done: CompletedProcess[str], place: Path, reason: str) -> None:
    assert done.returncode in (1, 2), done.stderr
    assert f"error: {place}" in done.stderr
    assert reason in done.stderr and "remedy:" in done.stderr
    assert "Traceback" not in done.stderr


@contextmanager
def silent_server() -> Iterator[str]:
    """Takes connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


@pytest.mark.parametrize("wrong", ["closed port", "silence", "no bucket", "no driver"])
def test_an_object_store_that_cannot_be_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: str
) -> None:
    monkeypatch.setitem(object_store.RETRIES, "max_retries", 1)
    with s3_server() as environment, ExitStack() as silent:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        reason = "NoSuchBucket"
        if wrong == "closed port":
            monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
            reason = "Could not connect"
        elif wrong == "silence":
            monkeypatch.setenv("AWS_ENDPOINT_URL", silent.enter_context(silent_server()))
            monkeypatch.setattr(object_store, "DEADLINE_S", 1.0)
            reason = "no answer in 1 s"
        elif wrong == "no driver":
            monkeypatch.setitem(sys.modules, "tensorstore", None)
            reason = "tensorstore"
        folder = ("--set", "checkpoints.dir=s3://nobody-has-it/checkpoints")
        done = runspec("apply", *SPEC, "--runs-dir", str(tmp_path / "runs"), *folder)
    refused(done, Path("checkpoints.dir"), reason)
    assert not (tmp_path / "runs" / "small").exists()


@pytest.mark.parametrize(
    ("words", "at"),
    [
        (("apply", *SPEC, "--runs-dir", "HERE"), "small"),
        (("apply", *SPEC, "--set", "storage.dir=HERE"), "small"),
        (("apply", *SPEC, "--runs-dir", "RUNS", "--set", "checkpoints.dir=HERE"), "small/state"),
        (("plan", *SPEC, "-o", "HERE/mine.plan"), "mine.plan"),
        (("init", "HERE"), ""),
    ],
)
def test_a_folder_that_cannot_be_written(
    tmp_path: Path, bound: Bound, words: tuple[str | Path, ...], at: str
) -> None:
    closed, file = tmp_path / "closed", tmp_path / "file"
    closed.mkdir(mode=0o555)
    file.touch()
    runs = tmp_path / "runs"
    for here, reason, run in (
        (closed, "Permission denied", bound),
        (file / "below", "Not a directory", runspec),
    ):
        said = [str(word).replace("HERE", str(here)).replace("RUNS", str(runs)) for word in words]
        refused(run(*said), here / at if at else here, reason)
        # and nothing was made
        assert list(closed.iterdir()) == []
        assert not (runs / "small").exists()


@pytest.mark.parametrize("name", ["keys", "logs", "weights"])
def test_a_folder_of_the_run_itself(tmp_path: Path, bound: Bound, name: str) -> None:
    with prepared(small_spec(), tmp_path) as run:
        folder = run.directory / name
    folder.mkdir(exist_ok=True)
    folder.chmod(0o555)
    refused(bound("resume", "small", "--runs-dir", tmp_path), folder, "Permission denied")
    folder.chmod(0o755)
    shutil.rmtree(folder)
    folder.touch()
    said = runspec("resume", "small", "--runs-dir", tmp_path)
    refused(said, folder, "Not a directory: a file is there")


def test_a_run_directory_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "small").touch()
    done = runspec("apply", *SPEC, "--runs-dir", tmp_path)
    refused(done, tmp_path / "small", "Not a directory: a file is there")


def test_a_cache_beside_the_runs(tmp_path: Path, bound: Bound) -> None:
    (tmp_path / "runs").mkdir()
    tmp_path.chmod(0o555)
    done = bound("apply", *SPEC, "--runs-dir", tmp_path / "runs")
    refused(done, tmp_path / ".cache" / "warm_start", "Permission denied")
    assert list((tmp_path / "runs").iterdir()) == []
    tmp_path.chmod(0o755)


def test_a_lock_beside_a_spec_that_cannot_be_written(tmp_path: Path, bound: Bound) -> None:
    shutil.copytree(ROOT / "specs", tmp_path / "specs")
    (tmp_path / "specs").chmod(0o555)
    spec = tmp_path / "specs" / "target_short.yaml"
    done = bound("lock", spec, "--profile", "laptop")
    refused(done, tmp_path / "specs", "Permission denied")


def test_a_folder_that_nobody_may_look_into(tmp_path: Path, bound: Bound) -> None:
    with prepared(small_spec(), tmp_path / "runs"):
        pass
    (tmp_path / "runs").chmod(0o600)
    for words in (("apply", *SPEC), ("plan", *SPEC), ("status", "small")):
        done = bound(*words, "--runs-dir", tmp_path / "runs")
        refused(done, tmp_path / "runs", "Permission denied")
    (tmp_path / "runs").chmod(0o755)
