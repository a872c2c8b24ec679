"""A volunteer's whole command against a real run: join, lose the coordinator, leave, come back."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.e2e.quick import QuickRun
from tests.harness import ROOT
from tests.processes import alive, descendants
from tests.waiting import eventually

pytestmark = pytest.mark.slow


@contextmanager
def joined(link: str, folder: Path, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """`runspec join` in a process of its own, whose words go to `log`."""
    with log.open("ab") as out:
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "runspec", "join", link),
                *("--key", str(folder / "mine.key"), "--dir", str(folder / "volunteer")),
            ],
            cwd=ROOT,
            stdout=out,
            stderr=out,
        )
        try:
            yield process
        finally:
            process.kill()
            process.wait()


def test_a_volunteer_joins_by_a_link_leaves_and_comes_back(runs_dir: Path, tmp_path: Path) -> None:
    # given a run that starts no sampler, and says how to join it
    overrides = {
        "steps": 24,  # enough that some are left when the volunteer comes back
        "placement.roles": "[validators, relay-local]",
        "verify.lease_timeout": "2m",
    }
    log = tmp_path / "volunteer.log"
    with QuickRun(runs_dir, "joined", overrides) as run:
        run.wait_until((run.dir / "keys" / "root.key").exists, "its keys")
        run.wait_until(lambda: "coordinator" in run.pids(), "its roles")
        link = run.status()["join"]
        assert link.startswith("http://127.0.0.1:")
        assert f"runspec join '{link}'" in run.output()

        # when a stranger with nothing but the link joins
        with joined(link, tmp_path, log) as volunteer:
            run.wait_until(lambda: run.metrics(), "a first step", others=[volunteer])
            # and the coordinator is killed under it
            os.kill(run.status()["roles"]["coordinator"]["pid"], signal.SIGKILL)
            steps = len(run.metrics())
            run.wait_until(lambda: len(run.metrics()) > steps, "another", others=[volunteer])
            # then it works on, and leaves politely on Ctrl-C, with all that it started
            below = descendants(volunteer.pid)
            assert len(below) > 1, "the worker, and vLLM's core"
            volunteer.send_signal(signal.SIGINT)
            assert volunteer.wait(60) == 0, log.read_text()
            eventually(lambda: not any(map(alive, below)), "no process of its is left")
        words = log.read_text()
        assert "made a key" in words
        assert (tmp_path / "mine.key").stat().st_mode & 0o777 == 0o600
        assert "rollouts accepted" in words
        assert "left; thank you" in words

        # and when it comes back, under the same key, it is there to the end
        with joined(link, tmp_path, log) as volunteer:
            summary = run.finish()
            assert volunteer.wait(120) == 0, log.read_text()
        assert summary["steps"] == 24
        assert summary["rollouts_rejected"] == 0
        assert "the run is finished; thank you" in log.read_text()
