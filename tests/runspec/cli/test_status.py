"""`status`, `logs` and `delete` on a run that a real supervisor drives."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.harness import ROOT
from tests.runspec.cli.in_process import runspec
from tests.waiting import eventually


def test_an_engine_that_loads_is_shown_here_and_in_the_terminal(tmp_path: Path) -> None:
    # given a run whose sampler loads its engine
    hold = tmp_path / "small" / "hold"
    hold.parent.mkdir()
    hold.touch()
    command = [sys.executable, "-m", "tests.runspec.local.fake_run", str(tmp_path), "100000"]
    with subprocess.Popen(
        [*command, "loading"], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as supervisor:
        assert supervisor.stdout is not None
        # then the terminal says so
        lines = iter(supervisor.stdout.readline, "")
        assert any(line.endswith(" loading: loading vLLM\n") for line in lines)
        # and so does status
        shown = runspec("status", "small", "--runs-dir", tmp_path).stdout
        assert "running, loading vLLM" in shown

        def stage() -> str | None:
            status = runspec("status", "small", "--json", "--runs-dir", tmp_path).stdout
            found: str | None = json.loads(status)["roles"]["loading"]["stage"]
            return found

        assert stage() == "loading vLLM"
        # until the engine is there
        hold.unlink()
        eventually(lambda: stage() is None, "the end of the load")
        supervisor.terminate()
        supervisor.stdout.read()


def test_a_run_is_watched_read_and_deleted(alive: Path) -> None:
    runs = ("--runs-dir", alive)
    # while it is alive, status names its holder, its steps and the process of each role
    status = json.loads(runspec("status", "small", "--json", *runs).stdout)
    assert (status["state"], status["steps"]) == ("running", 100_000)
    assert status["step"] >= 1
    assert set(status["roles"]) == {"server", "learner", "worker"}
    for role in status["roles"].values():
        os.kill(role["pid"], 0)
    text = runspec("status", alive / "small").stdout
    assert "small: running" in text and "held by process" in text and "learner" in text
    # and watching goes on until somebody goes
    watch = [sys.executable, "-m", "runspec", "status", str(alive / "small"), "--watch"]
    with subprocess.Popen(watch, cwd=ROOT, stdout=subprocess.PIPE, text=True) as reader:
        assert reader.stdout is not None
        headlines = (line for line in reader.stdout if line.startswith("small: running"))
        assert next(headlines) and next(headlines)
        reader.terminate()
    # its logs can be read
    logs = runspec("logs", "small", "--role", "learner", *runs).stdout
    assert "starts at step 0" in logs
    assert "learner | " in runspec("logs", "small", *runs).stdout
    # and followed until the reader goes
    follow = [
        sys.executable,
        "-m",
        "runspec",
        "logs",
        str(alive / "small"),
        "--role",
        "worker",
        "-f",
    ]
    with subprocess.Popen(follow, cwd=ROOT, stdout=subprocess.PIPE, text=True) as reader:
        assert reader.stdout is not None
        assert "starting" in reader.stdout.readline()
        reader.terminate()
    # it cannot be deleted
    refused = runspec("delete", "small", "--yes", *runs)
    assert refused.returncode == 5
    assert "the run is alive" in refused.stderr
    # once its supervisor is killed, status says that it was interrupted
    holder = int(status["held_by"].split()[1])
    os.kill(holder, 9)

    def states() -> set[str]:
        status = json.loads(runspec("status", "small", "--json", *runs).stdout)
        return {status["state"], *(role["state"] for role in status["roles"].values())}

    # and so do its roles, once the kernel has ended them
    eventually(lambda: states() == {"interrupted", "ended"}, "the end of the supervisor")
    # and it can be deleted, after a question
    asked = runspec("delete", "small", *runs)
    assert asked.returncode == 1
    assert (alive / "small").exists()
    assert runspec("delete", "small", "--yes", *runs).returncode == 0
    assert list(alive.iterdir()) == []
