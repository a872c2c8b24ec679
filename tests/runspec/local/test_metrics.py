"""Figures of a run: rows, summary, evaluations, diagnosis; of documents and of islands too."""

from __future__ import annotations

import json
import re
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from runspec.cli.apply import LiveView, show_result
from runspec.cli.runs import wait_command
from runspec.cli.status import describe_command, read_status, status_command, step_line
from runspec.core.errors import UserError
from runspec.core.run_files import evaluation_file, evaluation_files
from runspec.core.schema import RunSpec
from runspec.core.schema.load import FILE_NAME, dump_resolved
from runspec.local.apply import REPORT_FILE, write_summary
from runspec.local.diagnosis import NEWEST, diagnose, is_learning
from runspec.local.metrics import JsonLines, read_rows, summarise
from runspec.local.run_view import FIRST_STEP_S, look_at
from runspec.local.state import RunState
from tests.runspec.local.dashboard.made_run import report
from tests.runspec.local.fake_run import ZERO, island_run, small_spec, store
from tests.runspec.supervised import supervised_spec
from verify.formats.documents import Evaluated, Figure, read_evaluations


def test_each_whole_line_is_read_once_and_a_cut_file_anew(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = JsonLines(path)
    assert lines.new_rows() == []
    path.write_text('{"step": 0}\n{"st{"step": 1}\n[1]\n{"st')
    assert [lines.new_rows(), lines.new_rows()] == [[{"step": 0}], []]
    with path.open("a") as file:
        file.write('ep": 1}\n')
    assert lines.new_rows() == [{"step": 1}]
    path.write_text('{"step": 0, "again": true}\n')
    assert lines.new_rows() == [{"step": 0, "again": True}]
    # and a step that is trained again counts once, by its last row
    path.write_text('{"step": 0, "x": 1}\n{"step": 1, "x": 1}\n{"step": 1, "x": 2}\n')
    assert [row["x"] for row in read_rows(tmp_path)] == [1, 2]


def test_numbers_that_are_not_finite_are_null_in_the_summary(tmp_path: Path) -> None:
    # given a step that diverged, in each of the ways that a JSON number can fail to be finite
    (tmp_path / FILE_NAME).write_bytes(dump_resolved(small_spec()))
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 0, "reward": -1.5, "length_error": 2.0}\n'
        '{"step": 1, "reward": NaN, "length_error": Infinity, "lag_max": 1e999, "train_s": NaN,'
        ' "by_target": {"8": {"length_mean": -Infinity}}}\n'
    )
    second, summary = read_rows(tmp_path)[1], write_summary(tmp_path, 1.0, print)
    # then those are null, the finite ones count, and the file is strict JSON
    assert (second["reward"], second["by_target"]) == (None, {"8": {"length_mean": None}})
    written = json.loads((tmp_path / "summary.json").read_text(), parse_constant=pytest.fail)
    assert written == summary
    figures = (written["reward_last"], written["length_error_last"], written["max_lag"])
    assert figures == (-1.5, 2.0, None)


def rollouts_row(step: int) -> dict[str, Any]:
    """Task reward .0 .1 .. 1.1; lag 0 but in the last step, which is half as large."""
    first, last = step == 0, step == 11
    row = {"step": step, "task_reward": step / 10, "reward": -1.0, "length_error": 24.0 - step}
    row |= {"lag_mean": 1.5 * last, "lag_max": 2 * last, "trained_rollouts": 64 if last else 128}
    row |= {"train_s": 3.0 if first else 1.0, "tokens_per_s": 20.0 if first else 100.0}
    row |= {"mfu": None if step < 10 else 0.25 * (step - 9), "skipped_updates": float(step == 5)}
    return row | {"wait_s": 12.0 * first, "learner_busy_fraction": 1 / 13 if first else 1.0}


def test_the_summary_of_twelve_steps() -> None:
    found = summarise([rollouts_row(step) for step in range(12)], wall_s=30.0, weights_bytes_sent=7)
    expected = {
        "steps": 12,
        "task_reward_first": 0.45,  # 0.0 .. 0.9
        "task_reward_last": 0.65,  # 0.2 .. 1.1
        "length_error_first": 19.5,  # 24 .. 15
        "max_lag": 2,
        "mean_lag": 1.5 * 64 / (11 * 128 + 64),
        "learner_busy_fraction": (11 + 15 / 13) / 26,  # of 26 s
        "learner_tokens_per_s": (11 * 100 + 3 * 20) / 14,
        "mfu": 0.375,  # of the two steps that have it
        "skipped_updates": 1,
    }
    assert {name: found[name] for name in expected} == pytest.approx(expected)


def test_results_are_read_by_evaluation_and_version(tmp_path: Path) -> None:
    other, ten = replace(ZERO, evaluation="aime"), replace(ZERO, version=10)
    store(tmp_path, ten, other, ZERO)
    assert read_evaluations(evaluation_files(tmp_path)) == [other, ZERO, ten]
    # and a file that is no result is named
    path = evaluation_file(tmp_path, "held-out", 0)
    path.write_bytes(path.read_bytes().replace(b'"faults":0', b'"faults":1'))
    with pytest.raises(UserError, match="signature does not match") as caught:
        read_evaluations([path])
    assert caught.value.place == str(path)


STEPS = 2 * NEWEST


def still(step: int, **figures: Any) -> dict[str, Any]:
    """A step of a run that stands still, for none of the reasons that are known."""
    usual = {"task_reward": 0.4 + 0.01 * (step % 3), "reward": 0.3 + 0.01 * (step % 3)}
    usual |= {"clip_fraction_low": 0.01, "clip_fraction_high": 0.01, "clip_fraction_delta": 0.0}
    usual |= {"length_mean": 20.0, "entropy": 1.0, "policy_drift": 0.02, "lag_mean": 2.0}
    usual |= {"filtered_groups": 0, "trained_rollouts": 128, "skipped_updates": 0}
    return {"step": step, **usual, **figures}


def names(rows: list[dict[str, Any]], spec: RunSpec | None = None, failed: int = 0) -> list[str]:
    return [cause.name for cause in diagnose(spec or small_spec(), rows, failed)]


@pytest.mark.parametrize(
    ("figures", "expected"),
    [
        ({}, []),
        ({"task_reward": 0.0, "reward": 0.0}, ["NothingRight"]),
        ({"filtered_groups": 90, "trained_rollouts": 128}, ["EqualGroups"]),
        ({"length_mean": 47.0}, ["CutOff"]),
        ({"clip_fraction_high": 0.35}, ["RatioClipped"]),
        ({"policy_drift": 0.2}, ["LagAtLimit"]),
        ({"policy_drift": 0.2, "lag_mean": 1.0}, []),
        ({"reward": -0.2}, ["LengthOutweighs"]),
        ({"skipped_updates": 1}, ["UpdatesSkipped"]),
        ({"entropy": 0.01}, []),  # it was never there
    ],
)
def test_each_cause_of_not_learning_has_its_name(
    figures: dict[str, Any], expected: list[str]
) -> None:
    assert names([still(step, **figures) for step in range(STEPS)]) == expected


def test_no_cause_is_named_too_early_or_of_a_run_that_learns() -> None:
    rows = [still(step, length_mean=47.5) for step in range(NEWEST)]
    assert [str(cause) for cause in diagnose(small_spec(), rows)] == [
        "CutOff: the mean output has 47.5 tokens, and 48 are the most "
        "(look at samplers.volunteers.max_new_tokens)"
    ]
    assert names(rows[1:]) == [] == names(rows, supervised_spec())
    # entropy that was there once has collapsed, and a grader that fails comes first
    rows = [still(step, entropy=1.0 if step < NEWEST else 0.01) for step in range(STEPS)]
    assert names(rows) == ["EntropyCollapsed"]
    rows = [still(step, task_reward=0.0, reward=0.0) for step in range(STEPS)]
    groups = STEPS * small_spec().grpo.prompts_per_step
    assert names(rows, failed=groups) == ["GraderFails", "NothingRight"]
    assert names(rows, failed=groups // 100) == ["NothingRight"]
    # and a run that rises or has all is not asked why
    for slope, learning in ((0.01, True), (-0.01, False), (0.0, True)):
        start = 0.5 if slope else 0.97
        rows = [
            still(step, task_reward=start + slope * step, reward=0.0, skipped_updates=1)
            for step in range(STEPS)
        ]
        assert is_learning(rows) == (names(rows) == []) == learning


def result_of(version: int, high: float, evaluation: str = "held-out") -> Evaluated:
    figures = {"mean": Figure(high - 0.08, high - 0.16, high)}
    return replace(ZERO, version=version, figures=figures, evaluation=evaluation)


LEARNED = [still(step, task_reward=min(0.86, 0.25 + 0.02 * step)) for step in range(3 * NEWEST)]


@pytest.mark.parametrize(
    ("rows", "results", "warned"),
    [
        (LEARNED, [result_of(0, 0.32), result_of(60, 0.36)], True),
        (LEARNED, [result_of(40, 0.36), result_of(60, 0.84)], False),  # the newest counts
        (LEARNED, [result_of(60, 0.84)], False),  # the interval reaches the training's reward
        (LEARNED, [result_of(60, 0.36, "others")], False),  # problems of another kind
        (LEARNED, [result_of(10, 0.1)], False),  # after too few steps
        ([still(step) for step in range(3 * NEWEST)], [result_of(60, 0.2)], False),  # no rise
    ],
)
def test_a_run_that_leaves_its_held_out_problems_behind_is_warned_of(
    rows: Any, results: Any, warned: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # given evaluations of problems that training holds out, and of a source of its own
    values = ("evaluations.held-out.every=10", "evaluations.others.source=asked")
    values += ("data.sources.asked.kind=jsonl", "data.sources.asked.uri=x.jsonl")
    spec = small_spec("small", 99, *values, "data.sources.asked.train=false")
    run_dir = write_run(tmp_path, spec, rows)
    store(run_dir, *results)
    # when somebody looks at it, then a line says so, with figures and fields, or none does
    status_command(spec.name, runs_dir=tmp_path)
    lines = [line for line in capsys.readouterr().out.splitlines() if "Generalise" in line]
    expected = (
        "warning: DoesNotGeneralise: held-out of version 60 has a task reward of 0.28 (0.2 to "
        "0.36), the steps before it had 0.86: more problems generalise, fewer steps keep what "
        "there is (look at data.sources.spell_backward, steps, optimizer.lr)"
    )
    assert lines == [expected] * warned
    assert len(read_status(run_dir)["diagnosis"]) == warned


@pytest.mark.parametrize("error", [None, 2.5])
def test_a_figure_that_a_run_does_not_have_is_not_shown(
    error: float | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # given a run with target lengths or without
    rows = [{**still(step), "length_error": error} for step in range(3)]
    run_dir = write_run(tmp_path, small_spec("small", 9), rows)
    write_summary(run_dir, 95.0, print)
    # when its status, its description, its last table and its live table are printed
    status_command(run_dir.name, runs_dir=tmp_path)
    describe_command(run_dir.name, runs_dir=tmp_path)
    show_result(run_dir)
    shown = (capsys.readouterr().out + panel_of(rows)).lower()
    # then each has the length error, or none
    assert shown.count("length error") == (4 if error else 0)


def panel_of(rows: list[dict[str, Any]]) -> str:
    """What `apply` draws of a run of 9 steps."""
    shown = list[Any]()

    class Screen:
        console = Console(width=120)

        def update(self, group: Any, *, refresh: bool) -> None:
            shown.append(group)

    LiveView("reads", 9, Screen()).show(rows, [], "")  # type: ignore[arg-type]
    with Screen.console.capture() as panel:
        Screen.console.print(shown[0])
    return panel.get()


def learner_row(step: int) -> dict[str, Any]:
    """A line of a learner on documents; held-out loss is measured every five steps."""
    measured = step % 5 == 4
    row = {"step": step, "version": step + 1, "time": 1000.0 + step, "loss": 3.1 - 0.1 * step}
    row |= {"nll": 3.0 - 0.1 * step, "bits_per_byte": 2.0 - 0.1 * step, "grad_norm": 0.5}
    row |= {"held_out_nll": 3.2 - 0.1 * step if measured else None}
    row |= {"held_out_bits_per_byte": 2.2 - 0.1 * step if measured else None}
    row |= {"tokens": 1900, "trained_tokens": 1800, "tokens_per_s": 1234.0, "mfu": 0.41}
    row |= {"train_s": 0.75, "wait_s": 0.25, "learner_busy_fraction": 0.75, "padding_share": 0.07}
    row |= {"waits": {"input": 0.05, "coordinator": 0.05, "checkpoint": 0.15}}
    return row | {"waited_for": "checkpoint", "epoch": 0.25 * (step + 1)}


def write_run(folder: Path, spec: RunSpec, rows: list[dict[str, Any]]) -> Path:
    """A run `reads` of which versions 0 and 10 are out."""
    run_dir = folder / spec.name
    for version in (0, 10):
        path = run_dir / "store/origin" / spec.name / "versions" / str(version) / "manifest.json"
        path.parent.mkdir(parents=True)
        path.write_text("{}")
    (run_dir / FILE_NAME).write_bytes(dump_resolved(spec))
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
    with closing(RunState(run_dir)):
        return run_dir


def test_status_and_report_of_a_run_on_documents(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # given 12 of 25 steps trained
    run_dir = write_run(tmp_path, supervised_spec(), [learner_row(step) for step in range(12)])
    status_command(run_dir.name, runs_dir=tmp_path)
    out = capsys.readouterr().out
    # then the held-out loss is that of step 9, the last that measured it
    line = "step 12/25  loss 2  held out 2.3 (1.3 bits a byte)  1,234 tok/s  MFU 41 %"
    assert f"{line}  waited for input 10 %\nversion 10 is published\n" in out
    assert "invite" not in out and "task reward" not in out
    describe_command(run_dir.name, runs_dir=tmp_path)
    described = capsys.readouterr().out
    assert "held out nll:" in described and "NothingSolved" not in described
    assert not re.search("task reward|rollout|length error|lag", described)
    # and version 10 is the newest that is due before step 20, and nobody is asked to join
    status = read_status(run_dir)
    conditions_found = {each["type"]: each["status"] for each in status["conditions"]}
    assert conditions_found["Published"] == "True"
    assert (status["published"], status["join"]) == (10, None)
    # and its first step may take long, while the last one brings a version
    seen = look_at(run_dir)
    assert replace(seen, rows=[]).late_after_s == FIRST_STEP_S
    done = replace(seen, rows=[learner_row(24)], versions=[0, 10, 20])
    assert done.conditions["Published"].reason == "Behind"
    # when it ends, then the page has the plots of such a run, and no rewards
    summary = write_summary(run_dir, 95.0, print)
    assert summary is not None and summary["trained_tokens"] == 12 * 1800
    assert summary["held_out_nll_last"] == pytest.approx(2.3)
    page = report(run_dir / REPORT_FILE)
    found = {figure["title"] for figures in page["figures"].values() for figure in figures}
    assert {"Loss", "Held-out loss", "Bits a byte", "Gradient norm", "MFU"} <= found
    shown = json.dumps([page["head"]["ends"], page["head"]["facts"], page["figures"]])
    assert "eward" not in shown and "rollout" not in shown
    # and measurements after steps 4 and 9 are the evaluation held-out of versions 5 and 10
    for evaluations in (read_status(run_dir)["evaluations"], summary["evaluations"]):
        losses = [(each["version"], each["loss"][0]) for each in evaluations["held-out"]]
        assert losses == [(5, pytest.approx(2.8)), (10, pytest.approx(2.3))]
    for text, missed in {"<2.5": 0, ".loss<2.1": 1, ".bits-per-byte<1.5": 0, ".mean>0": 1}.items():
        awaited = f"evaluation:held-out{text}"
        assert wait_command(run_dir.name, awaited, 0.0, tmp_path) == missed, text


WHY = "no share offered, 60 s after the quorum of 2"


def island_row(step: int, **commit: Any) -> dict[str, Any]:
    """A line of the first of three islands, which has a quarter of the weight."""
    islands: dict[str, Any] = {"step": step, "contributors": ["a", "b", "c"], "dropped": {}}
    islands |= {"part": 0.25, "share_bytes": 4_000_000, "received_bytes": 8_000_000}
    islands |= {"share_norm": 2.0 + step, "cosine": 0.5, "settle_s": 0.9, **commit}
    row = {**learner_row(step), "tokens": 1000, "train_s": 3.0, "wait_s": 1.0}
    return row | {
        "waits": {"islands": 0.8, "input": 0.2},
        "waited_for": "islands",
        "islands": islands,
    }


DROPPED = island_row(1, contributors=["a", "b"], dropped={"c": WHY}, received_bytes=4_000_000)


@pytest.fixture
def islands(tmp_path: Path) -> Path:
    """A run with three islands, the second step without c, and what its servers have sent."""
    spec = island_run(*({"name": name} for name in "abc"))
    run_dir = write_run(tmp_path, spec, [island_row(0), DROPPED])
    for each, sent in (("origin", 5), ("relay-x", 7), ("shares-a", 70), ("shares-b", 8)):
        (run_dir / "store" / each).mkdir(parents=True, exist_ok=True)
        (run_dir / "store" / each / "served.json").write_text(json.dumps({"bytes": sent}))
    (run_dir / "store" / "torn").mkdir()
    (run_dir / "store" / "torn" / "served.json").write_text("torn{")
    return run_dir


def test_status_panel_and_report_say_who_was_dropped_and_what_the_exchange_cost(
    islands: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status_command("reads", runs_dir=islands.parent)
    status = capsys.readouterr().out
    describe_command("reads", islands.parent)
    described, panel = capsys.readouterr().out, panel_of([DROPPED])
    for text in (f"c: {WHY}", "norm 3, cosine to the others' 0.5"):
        assert all(text in each for each in (status, described, panel))
    for text in (
        "step 1, shares of a, b",
        "4 MB up to each island that fetches it, 4 MB down",
        "waited for 0.8 s of the step (20 %); busy 75 %",
        "about 1,000 tokens/s",  # of 1,000 in 4 s, which are a quarter of the islands'
    ):
        assert text in status and text in described
    line = step_line([DROPPED], 9)
    assert "waited 25 %, most for the islands" in line and line.endswith("islands 2/3 without c")
    # and the summary counts no bytes of shares as weights
    summary = write_summary(islands, 8.0, print)
    assert summary is not None and summary["weights_bytes_sent"] == 12
    expected = {"dropped": {"c": 1}, "sent_bytes": 78, "received_bytes": 12_000_000}
    expected |= {"wait_share": pytest.approx(0.2), "tokens_per_s": 1000.0}
    assert expected.items() <= summary["islands"].items()
    page = report(islands / REPORT_FILE)
    assert {"Agreement", "Contributors"} <= {plot["title"] for plot in page["figures"]["Islands"]}
    assert "c in 1 steps" in [text for _, text in page["head"]["facts"]]
