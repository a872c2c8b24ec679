"""Runs that train on documents: their conditions, summary, report and status."""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from runspec.cli.apply import show_result
from runspec.cli.status import describe_command, read_status, status_command
from runspec.cli.wait import wait_command
from runspec.core.run_files import METRICS_FILE as METRICS
from runspec.core.spec.resolved import FILE_NAME, dump_resolved
from runspec.local.conditions import FIRST_STEP_S, condition, conditions, late_after_s
from runspec.local.report import REPORT_FILE, write_summary
from runspec.local.snapshot import look_at
from runspec.local.state import RunState
from tests.runspec.local.dashboard.exported import report
from tests.runspec.supervised import supervised_spec

STEPS = 12


def row(step: int) -> dict[str, Any]:
    """A line of the learner; held-out loss is measured every five steps."""
    measured = step % 5 == 4
    return {
        "step": step,
        "version": step + 1,
        "time": 1000.0 + step,
        "loss": 3.1 - 0.1 * step,
        "nll": 3.0 - 0.1 * step,
        "z": 0.5,
        "held_out_nll": 3.2 - 0.1 * step if measured else None,
        "held_out_bits_per_byte": 2.2 - 0.1 * step if measured else None,
        "bits_per_byte": 2.0 - 0.1 * step,
        "grad_norm": 0.5,
        "nonfinite_tokens": 0,
        "skipped_updates": 0,
        "tokens": 1900,
        "trained_tokens": 1800,
        "tokens_per_s": 1234.0,
        "padding_share": 0.07,
        "mfu": 0.41,
        "mfu_update": 0.5,
        "train_s": 0.75,
        "update_s": 0.7,
        "wait_s": 0.25,
        "waits": {"input": 0.05, "coordinator": 0.05, "checkpoint": 0.15},
        "waited_for": "checkpoint",
        "learner_busy_fraction": 0.75,
        "learning_rate": 1e-3,
        "epoch": 0.25 * (step + 1),
        "first_row": 32 * step,
        "last_row": 32 * step + 32,
        "replay_difference": None,
    }


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run of twelve steps of 25, of which versions 0 and 10 are out."""
    spec = supervised_spec()
    folder = tmp_path / spec.name
    for version in (0, 10):
        path = folder / "store/origin" / spec.name / "versions" / str(version) / "manifest.json"
        path.parent.mkdir(parents=True)
        path.write_text("{}")
    (folder / FILE_NAME).write_bytes(dump_resolved(spec))
    lines = "".join(json.dumps(row(step)) + "\n" for step in range(STEPS))
    (folder / METRICS).write_text(lines)
    with closing(RunState(folder)):
        pass
    return folder


def test_status_shows_the_figures_and_a_version_that_is_not_behind(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # when the status is printed
    status_command(run_dir.name, False, run_dir.parent)
    out = capsys.readouterr().out
    # then the held-out loss is that of step 9, the last that measured it
    line = "step 12/25  loss 2  held out 2.3 (1.3 bits a byte)  1,234 tok/s  MFU 41 %"
    assert f"{line}  waited for input 10 %\nversion 10 is published\n" in out
    status = read_status(run_dir)
    assert status["training"] == pytest.approx(
        {"held_out_nll": 2.3, "held_out_bits_per_byte": 1.3, "input_wait_share": 0.1}
    )
    # and version 10 is the newest that is due before step 20
    found = {each["type"]: each for each in status["conditions"]}
    assert found["Published"]["status"] == "True"
    assert found["NothingSolved"]["status"] == found["LogprobAlarm"]["status"] == "False"
    # and nobody is asked to join
    assert (status["published"], status["join"]) == (10, None)
    describe_command(run_dir.name, run_dir.parent)
    described = capsys.readouterr().out
    assert "2 x 1,024 tokens" in described and "every 10 steps" in described
    assert "invite" not in out + described and "task reward" not in described


def test_what_the_learner_measures_is_an_evaluation(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # given measurements after steps 4 and 9, when the run is looked at
    status_command(run_dir.name, False, run_dir.parent)
    # then they are the evaluation held-out of versions 5 and 10
    assert "held-out, version 10: loss 2.3, bits-per-byte 1.3\n" in capsys.readouterr().out
    summary = write_summary(run_dir, 95.0)
    assert summary is not None
    for evaluations in (read_status(run_dir)["evaluations"], summary["evaluations"]):
        found = evaluations["held-out"]
        assert [(each["version"], round(each["loss"][0], 6)) for each in found] == [
            *((5, 2.8), (10, 2.3))
        ]
        assert found[-1]["bits-per-byte"] == [pytest.approx(1.3), None, None]
    # and its figures can be waited for; the loss stands for it
    for text, holds in (
        ("evaluation:held-out<2.5", True),
        ("evaluation:held-out.loss<2.1", False),
        ("evaluation:held-out.bits-per-byte<1.5", True),
        ("evaluation:held-out.mean>0", False),
        ("evaluation:other<9", False),
    ):
        assert wait_command(run_dir.name, text, 0.0, run_dir.parent) == (0 if holds else 1), text
    assert "(version 10: loss 2.3" in capsys.readouterr().out


def test_the_first_step_may_take_long(run_dir: Path) -> None:
    seen = look_at(run_dir)
    assert late_after_s(replace(seen, rows=[])) == FIRST_STEP_S
    # and the last step is to bring a version, whatever its number
    done = replace(seen, rows=[row(24)], versions=[0, 10, 20])
    assert condition(conditions(done), "Published").reason == "Behind"


def test_the_report_has_losses_in_place_of_rewards(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # when the report of the run is written
    summary = write_summary(run_dir, 95.0)
    # then the summary has sums, means of ten steps, and the first and last measurement
    assert summary is not None
    assert (summary["tokens"], summary["trained_tokens"]) == (12 * 1900, 12 * 1800)
    assert summary["nll_first"] == pytest.approx(3.0 - 0.45)
    assert summary["held_out_nll_first"] == pytest.approx(2.8)
    assert summary["held_out_nll_last"] == pytest.approx(2.3)
    assert summary["input_wait_share"] == pytest.approx(0.1)
    assert summary["epoch"] == 3.0
    # and the page has the plots of such a run, and no rewards
    page = report(run_dir / REPORT_FILE)
    found = [figure["title"] for figures in page["figures"].values() for figure in figures]
    titles = ("Loss", "Held-out loss", "Bits a byte", "Gradient norm", "Learner's speed", "MFU")
    assert {*titles} <= {*found}
    assert "22,800 tokens, 3 epochs" in page["head"]["work"]
    shown = json.dumps([page["head"]["ends"], page["head"]["facts"], page["figures"]])
    assert "eward" not in shown and "rollout" not in shown
    # and so has what `apply` prints at the end
    show_result(run_dir)
    assert "Bits a byte" in capsys.readouterr().out
