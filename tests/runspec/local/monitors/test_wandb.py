"""The files of offline runs of Weights & Biases have what the run directory has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.runspec.local.monitors.fake_wandb_server import fake_wandb_server
from tests.runspec.local.monitors.logged_run import KEYS, STEPS, LoggedRun, row

pytestmark = pytest.mark.slow  # each session starts wandb's own process


def history(run: LoggedRun) -> list[dict[str, Any]]:
    """Return the rows of history of all sessions, as `wandb sync` sends them: by their start."""
    from runspec.local.monitors.wandb import records

    rows = []
    for path in sorted(run.folder.glob("wandb/offline-run-*/*.wandb")):
        for record in records(path):
            items = record.history.item
            row = {"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in items}
            rows += [row] if row else []
    return rows


def require_all(rows: list[dict[str, Any]], count: int) -> None:
    assert [each["_step"] for each in rows] == list(range(len(rows)))
    figures = [each for each in rows if "figure_0" in each]
    assert [each["step"] for each in figures] == list(range(count))
    for i in range(KEYS):
        name = f"figure_{i}"
        assert [each[name] for each in figures] == [row(step)[name] for step in range(count)]


def test_an_offline_run_has_steps_evaluations_rollouts_and_the_spec(tmp_path: Path) -> None:
    from runspec.local.monitors.wandb import records

    # given a run that is over
    run = LoggedRun(tmp_path / "run", "kind: wandb, mode: offline")
    run.train(range(STEPS))
    run.evaluate(0, 10, STEPS)
    # when a monitor sends it
    run.end()
    # then the folder has it
    rows = history(run)
    require_all(rows, STEPS)
    evaluated = [each for each in rows if "evaluations/held-out/mean" in each]
    assert [each["version"] for each in evaluated] == [0, 10, STEPS]
    assert evaluated[0]["evaluations/held-out/mean/low"] == 0.2
    assert [each["step"] for each in rows if "rollouts/path" in each] == [0, 10, 20]
    [session] = run.folder.glob("wandb/offline-run-*")
    [first, *_] = sorted((session / "files" / "media" / "html").glob("rollouts_*.html"))
    assert "<pre># spell\n*cat*</pre>" in first.read_text()
    assert "<pre>tac&lt;eos&gt;</pre>" in first.read_text()  # what a model wrote is no HTML
    [path] = session.glob("*.wandb")
    [config] = [each.run.config for each in records(path) if each.HasField("run")]
    assert json.loads({each.key: each.value_json for each in config.update}["steps"]) == STEPS


def test_killed_processes_leave_no_gap_and_no_double(tmp_path: Path) -> None:
    # given a run of many steps, and monitors that are killed while they send
    count = 400
    run = LoggedRun(tmp_path / "run", "kind: wandb, mode: offline")
    run.train(range(count))
    for entries in (100, 300):
        run.kill_at(entries)
    run.end()
    # then the sessions together have each figure once
    assert len(list(run.folder.glob("wandb/offline-run-*"))) > 1
    require_all(history(run), count)


def test_a_server_has_each_entry_once_whatever_it_had_when_the_monitor_was_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with fake_wandb_server() as server:
        monkeypatch.setenv("WANDB_BASE_URL", server.url)
        monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
        # given a run whose first monitor is killed, and whose second sends all there is by then
        run = LoggedRun(tmp_path / "run", "kind: wandb")
        run.train(range(STEPS))
        run.kill_at(10)
        run.end()
        require_all([json.loads(line) for line in server.lines], STEPS)
        assert sum("html/rollouts" in name for name in server.files) == 3
        # when the server has lost the newest entries, and the run has gone on
        del server.lines[-7:]
        run.train(range(STEPS, STEPS + 10))
        run.end()
    # then it has each once all the same
    require_all([json.loads(line) for line in server.lines], STEPS + 10)
