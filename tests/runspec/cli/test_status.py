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
