"""trackio's database has what the run directory has. Needs trackio's own environment."""

from __future__ import annotations

import json
import os
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from runspec.core.process import EXIT_USER_ERROR, RunStopped
from tests.harness import ROOT
from tests.runspec.local.monitors.logged_run import KEYS, STEPS, LoggedRun, row

PYTHON = Path(os.environ.get("TRACKIO_PYTHON", ROOT / ".venv" / "trackio" / "bin" / "python"))
needs_trackio = pytest.mark.skipif(not PYTHON.is_file(), reason="`make trackio` was not run")


def rows_of(run: LoggedRun) -> list[tuple[str, int, dict[str, Any]]]:
    """Run, step and values of everything in the project's database, as it was written."""
    with closing(sqlite3.connect(run.folder / "mine.db")) as database:
        found = database.execute("SELECT run_name, step, metrics FROM metrics ORDER BY id")
        return [(name, step, json.loads(values)) for name, step, values in found]


def require_all(run: LoggedRun, count: int) -> None:
    figures = [(step, values) for _, step, values in rows_of(run) if "figure_0" in values]
    assert [step for step, _ in figures] == list(range(count))
    for i in range(KEYS):
        name = f"figure_{i}"
        assert [values[name] for _, values in figures] == [row(s)[name] for s in range(count)]


@needs_trackio
@pytest.mark.slow
def test_a_run_has_steps_evaluations_rollouts_and_the_spec(tmp_path: Path) -> None:
    # given a run that is over
    run = LoggedRun(tmp_path / "run", f"kind: trackio, project: mine, python: {PYTHON}")
    run.train(range(STEPS))
    run.evaluate(0, 10, STEPS)
    # when a monitor sends it, in two sessions
    run.follow()
    run.follow()
    # then the database has it once
    require_all(run, STEPS)
    rows = rows_of(run)
    evaluated = [each for each in rows if "evaluations/held-out/mean" in each[2]]
    assert [step for _, step, _ in evaluated] == [0, 10, STEPS]
    sampled = [(step, values["rollouts"]) for _, step, values in rows if "rollouts" in values]
    assert [step for step, _ in sampled] == [0, 10, 20]
    assert "tac<eos>" in json.dumps(sampled[0][1])
    assert len({name for name, _, _ in rows}) == 1
    with closing(sqlite3.connect(run.folder / "mine.db")) as database:
        [[config]] = database.execute("SELECT config FROM configs")
    assert json.loads(config)["steps"] == STEPS


@needs_trackio
@pytest.mark.slow
def test_killed_processes_leave_no_gap_and_no_double(tmp_path: Path) -> None:
    count = 400
    run = LoggedRun(tmp_path / "run", f"kind: trackio, project: mine, python: {PYTHON}")
    run.train(range(count))
    for entries in (100, 300):
        run.kill_at(entries)
    run.end()
    require_all(run, count)


def test_an_interpreter_that_is_not_there_is_not_tried_again(tmp_path: Path) -> None:
    run = LoggedRun(tmp_path / "run", f"kind: trackio, python: {tmp_path / 'python'}")
    with pytest.raises(RunStopped, match=r"cannot start .*python: No such file"):
        run.follow()


def test_a_script_that_ends_is_told_of(tmp_path: Path) -> None:
    # given an interpreter without trackio
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexit 7\n")
    python.chmod(0o755)
    run = LoggedRun(tmp_path / "run", f"kind: trackio, python: {python}")
    process = run.process()
    told = process.communicate(timeout=60)[1].decode()
    # then the monitor ends as one that is started again later
    assert process.returncode == EXIT_USER_ERROR
    assert "its script ended with exit code 7" in told or "Broken pipe" in told
