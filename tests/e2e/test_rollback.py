"""The real loop, paused, taken back and resumed to its end."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from broadcast.store import newest_version
from tests.e2e.quick import QuickRun
from tests.harness import PATIENCE_S, runspec
from verify.coordinator.events import RolledBack
from verify.formats.layout import STATE_FILE
from verify.ledger import Ledger

pytestmark = pytest.mark.slow


def test_a_run_taken_back_trains_on_from_that_version(runs_dir: Path) -> None:
    # given a run that sends deltas (at so small a rate few float32 bits change), paused after its
    # fourth step
    overrides = {"steps": 12, "checkpoints.every": 2, "checkpoints.keep": 9}
    overrides |= {"broadcast.format": "delta", "optimizer.lr": 1e-10}
    with QuickRun(runs_dir, "back", overrides) as run:
        run.wait_for_step(4)
        paused = runspec("pause", run.dir, timeout_s=120)
        assert paused.returncode == 0, paused.stderr
        assert run.process is not None
        assert run.process.wait(30) == 0
        assert run.status()["state"] == "paused"
        assert runspec("pause", run.dir).returncode == 0, "a paused run is paused"
        trained = run.metrics()
        root = (run.dir / "keys" / "root.key").read_bytes()
        # when it is taken back to version 2 and resumed
        back = runspec("rollback", run.dir, "--to", "2", "--yes")
        assert back.returncode == 0, back.stderr
        assert run.metrics() == trained[:2]
        for log in (run.dir / "logs").glob("*.log"):
            log.unlink()  # so that only what comes is looked at
        resumed = runspec("resume", run.dir, timeout_s=PATIENCE_S)
    # then it reaches its end, every step there once, those below the version as they were
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr + run.output()
    assert [line["step"] for line in run.metrics()] == list(range(12))
    assert run.metrics()[:2] == trained[:2]
    assert all(line["lag_max"] <= 2 for line in run.metrics())
    # and nobody complains, but of servers that were not up yet
    complaints = [
        line
        for log in sorted((run.dir / "logs").glob("*.log"))
        for line in log.read_text(errors="replace").splitlines()
        if (" E " in line or " W " in line or "Traceback" in line)
        and not re.search("Cannot connect to host|Connection refused", line)
    ]
    assert complaints == []
    # and version 2 was signed and published anew, under a root of its own
    assert (run.dir / "keys" / "root.key").read_bytes() != root
    store = run.dir / "store" / "origin"
    assert newest_version(store, run="back") == 12
    # whole, for nobody has what it could be a delta of, and those after it as deltas again
    publisher = (run.dir / "logs" / "publisher.log").read_text()
    assert "version 2 published whole" in publisher
    assert all(
        f"version {v} published as a delta of version {v - 1}" in publisher for v in range(3, 13)
    )
    ledger = Ledger(run.dir / STATE_FILE)
    events = list(ledger.events())
    ledger.close()
    assert [event.version for event in events if isinstance(event, RolledBack)] == [2]
    # and all other commands work on it
    for words in (["status"], ["describe"], ["events"], ["logs"], ["resume"]):
        done = runspec(*words, run.dir)
        assert done.returncode == 0, done.stderr
    assert runspec("wait", run.dir, "--for", "Finished").returncode == 0
    assert runspec("delete", run.dir, "--yes").returncode == 0
