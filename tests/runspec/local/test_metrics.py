"""Figures of a run: rows, summary, evaluations, diagnosis; of documents and of islands too."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from runspec.cli.apply import show_result
from runspec.cli.status import describe_command, read_status, status_command
from runspec.cli.view import LiveView, step_line
from runspec.cli.wait import Awaited, holds, parse_awaited, wait_command, why_never
from runspec.core.errors import UserError
from runspec.core.run_files import evaluation_file, evaluation_files
from runspec.core.spec.resolved import FILE_NAME, dump_resolved
from runspec.core.spec.schema import RunSpec
from runspec.local.conditions import FIRST_STEP_S, condition, conditions, late_after_s
from runspec.local.diagnosis import NEWEST, cause_lines, diagnose, is_learning
from runspec.local.endpoints import Endpoints, save_endpoints
from runspec.local.evaluations import (
    NewResults,
    evaluation_plots,
    newest,
    result_line,
    summarise_evaluations,
)
from runspec.local.metrics import (
    JsonLines,
    read_rows,
    summarise,
    time_left_s,
    weights_bytes_sent,
)
from runspec.local.report import REPORT_FILE, write_summary
from runspec.local.run_dir import hold
from runspec.local.snapshot import look_at
from runspec.local.state import RunState
from tests.runspec.local.dashboard.exported import report
from tests.runspec.local.fake_run import ZERO, island_run, prepared, small_spec, store
from tests.runspec.supervised import supervised_spec
from verify.formats.evaluation import Figure, read_evaluations


def test_the_time_that_is_left_goes_by_the_median_of_the_newest_steps() -> None:
    # given steps of 2 s, one of which took long
    times = [0.0, 2.0, 4.0, 100.0, 102.0, 104.0]
    rows = [{"step": step, "time": at} for step, at in enumerate(times)]
    assert (time_left_s(rows, 16), time_left_s(rows, 6)) == (20.0, 0.0)
    assert (time_left_s(rows[:3], 4), time_left_s(rows[:2], 16)) == (2.0, None)


def test_each_whole_line_is_read_once_and_a_cut_file_anew(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = JsonLines(path)
    assert lines.new_rows() == []
    path.write_text('{"step": 0}\n{"st{"step": 1}\n[1]\n{"st')
    assert lines.new_rows() == [{"step": 0}]
    assert lines.new_rows() == []
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
    second, summary = read_rows(tmp_path)[1], write_summary(tmp_path, 1.0)
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
    row |= {"accepted_rollouts": 128, "rejected_rollouts": int(step == 3)}
    row |= {"train_s": 3.0 if first else 1.0, "tokens_per_s": 20.0 if first else 100.0}
    row |= {"mfu": None if step < 10 else 0.25 * (step - 9), "skipped_updates": float(step == 5)}
    row |= {"wait_s": 12.0 * first, "learner_busy_fraction": 1 / 13 if first else 1.0}
    row |= {"sampler_busy_fraction": None if first else 0.5}
    row |= {"verdict_latency_p50": None if first else 2.0}
    return row | {"manifest_latency_p99": None if first else float(step)}


def test_the_summary_of_twelve_steps() -> None:
    rows = [rollouts_row(step) for step in range(12)]
    assert summarise(rows, wall_s=30.12345, weights_bytes_sent=77) == {
        "steps": 12,
        "task_reward_first": pytest.approx(0.45),  # 0.0 .. 0.9
        "task_reward_last": pytest.approx(0.65),  # 0.2 .. 1.1
        "reward_first": -1.0,
        "reward_last": -1.0,
        "length_error_first": pytest.approx(19.5),  # 24 .. 15
        "length_error_last": pytest.approx(17.5),  # 22 .. 13
        "rollouts_accepted": 1536,
        "rollouts_rejected": 1,
        "max_lag": 2,
        "mean_lag": pytest.approx(1.5 * 64 / (11 * 128 + 64)),
        "sampler_busy_fraction": pytest.approx(0.5),
        "verdict_latency_p50": 2.0,
        "verdict_latency_p99": None,
        "manifest_latency_p50": None,
        "manifest_latency_p99": 11.0,
        "learner_busy_fraction": pytest.approx((11 + 15 / 13) / 26),  # of 26 s
        "learner_tokens_per_s": pytest.approx((11 * 100 + 3 * 20) / 14),
        "mfu": pytest.approx(0.375),  # of the two steps that have it
        "skipped_updates": 1,
        "wall_s": 30.123,
        "weights_bytes_sent": 77,
        "islands": None,
    }


TWO = replace(ZERO, version=2, figures={**ZERO.figures, "mean": Figure(0.75, 0.7, 0.8)}, faults=3)


def test_results_are_read_by_evaluation_and_version(tmp_path: Path) -> None:
    other, ten = replace(ZERO, evaluation="aime"), replace(ZERO, version=10)
    store(tmp_path, ten, TWO, other, ZERO)
    found = read_evaluations(evaluation_files(tmp_path))
    assert found == [other, ZERO, TWO, ten]
    assert newest(found) == {"aime": other, "held-out": ten}
    # and a file that is no result is named
    path = evaluation_file(tmp_path, "held-out", 0)
    path.write_bytes(path.read_bytes().replace(b'"faults":0', b'"faults":1'))
    with pytest.raises(UserError, match="signature does not match") as caught:
        read_evaluations([path])
    assert caught.value.place == str(path)


def test_results_are_shown_as_lines_rows_and_curves() -> None:
    assert result_line(TWO) == (
        "version 2: mean 0.75 (0.7 to 0.8), pass-2 0.4 (0.3 to 0.5), pass-4 0.5 (0.4 to 0.6), "
        "length 20, 3 answers without a grade"
    )
    found = summarise_evaluations([ZERO, TWO])["held-out"]
    assert [(each["version"], each["mean"], each["faults"]) for each in found] == [
        *((0, [0.25, 0.2, 0.3], 0), (2, [0.75, 0.7, 0.8], 3))
    ]
    plots = evaluation_plots([ZERO, TWO])
    assert [(plot.title, plot.bottom) for plot in plots] == [
        *(("held-out: task reward", None), ("held-out: pass@k", None), ("held-out: length", 0.0))
    ]
    mean, several, length = (plot.curves for plot in plots)
    assert list(mean[0].points) == [(0, 0.25), (2, 0.75)]
    assert list(mean[0].band) == [(0, 0.2, 0.3), (2, 0.7, 0.8)]
    assert [curve.label for curve in several] == ["pass-2", "pass-4"]
    assert list(length[0].band) == []


def test_each_new_result_is_reported_once(tmp_path: Path) -> None:
    store(tmp_path, ZERO)
    new = NewResults(tmp_path)
    assert new.lines() == []
    store(tmp_path, TWO)
    assert new.lines() == [f"held-out of {result_line(TWO)}"]
    assert new.lines() == []


def test_a_figure_can_be_waited_for(tmp_path: Path) -> None:
    at_zero = {"held-out.mean>0.2", "held-out.length<20.5"}
    known = {*at_zero, "held-out>0.6", "held-out.pass-4>0.6", "held-out.pass-8>0.1"}
    with prepared(small_spec(), tmp_path) as run:
        for results, holding in (
            ([], set()),
            ([ZERO], at_zero),
            ([TWO], at_zero | {"held-out>0.6"}),
        ):
            store(run.directory, *results)
            seen = look_at(run.directory)
            for text in known:
                awaited = parse_awaited(f"evaluation:{text}")
                assert holds(awaited, seen) == (text in holding)
                assert why_never(awaited, seen) is None
        why = why_never(Awaited("evaluation", "aime"), look_at(run.directory))
    assert why == "the run has no evaluation 'aime'"


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


def test_entropy_that_was_there_once_has_collapsed() -> None:
    rows = [still(step, entropy=1.0 if step < NEWEST else 0.01) for step in range(STEPS)]
    assert names(rows) == ["EntropyCollapsed"]


def test_a_grader_that_fails_comes_first() -> None:
    rows = [still(step, task_reward=0.0, reward=0.0) for step in range(STEPS)]
    groups = STEPS * small_spec().grpo.prompts_per_step
    assert names(rows, failed=groups) == ["GraderFails", "NothingRight"]
    assert names(rows, failed=groups // 100) == ["NothingRight"]


@pytest.mark.parametrize(
    ("reward", "learning"),
    [
        (lambda step: 0.2 + 0.01 * step, True),
        (lambda step: 0.6 - 0.01 * step, False),
        (lambda step: 0.4 + 0.05 * (step % 2), False),
        (lambda step: 0.97, True),
    ],
)
def test_a_run_that_rises_or_has_all_is_not_asked_why(
    reward: Callable[[int], float], learning: bool
) -> None:
    rows = [still(s, task_reward=reward(s), reward=0.0, skipped_updates=1) for s in range(STEPS)]
    assert is_learning(rows) == learning
    assert (names(rows) == []) == learning


def test_no_cause_is_named_too_early_and_each_with_numbers_and_fields() -> None:
    rows = [still(step, length_mean=47.5) for step in range(NEWEST)]
    assert list(cause_lines(diagnose(small_spec(), rows))) == [
        "CutOff: the mean output has 47.5 tokens, and 48 are the most "
        "(look at samplers.volunteers.max_new_tokens)"
    ]
    assert names(rows[1:]) == [] == names(rows, supervised_spec())


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


@pytest.fixture
def documents(tmp_path: Path) -> Path:
    """A run on documents, of whose 25 steps 12 are trained."""
    return write_run(tmp_path, supervised_spec(), [learner_row(step) for step in range(12)])


def test_status_of_a_run_on_documents(documents: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status_command(documents.name, False, documents.parent)
    out = capsys.readouterr().out
    # then the held-out loss is that of step 9, the last that measured it
    line = "step 12/25  loss 2  held out 2.3 (1.3 bits a byte)  1,234 tok/s  MFU 41 %"
    assert f"{line}  waited for input 10 %\nversion 10 is published\n" in out
    assert "held-out, version 10: loss 2.3, bits-per-byte 1.3\n" in out
    status = read_status(documents)
    figures = {"held_out_nll": 2.3, "held_out_bits_per_byte": 1.3, "input_wait_share": 0.1}
    assert status["training"] == pytest.approx(figures)
    # and version 10 is the newest that is due before step 20, and nobody is asked to join
    found = {each["type"]: each["status"] for each in status["conditions"]}
    assert (found["Published"], found["NothingSolved"], found["LogprobAlarm"]) == (
        *("True", "False", "False"),
    )
    assert (status["published"], status["join"]) == (10, None)
    describe_command(documents.name, documents.parent)
    described = capsys.readouterr().out
    assert "2 x 1,024 tokens" in described and "every 10 steps" in described
    assert "invite" not in out + described and "task reward" not in described
    # and its first step may take long, while the last one brings a version
    seen = look_at(documents)
    assert late_after_s(replace(seen, rows=[])) == FIRST_STEP_S
    done = replace(seen, rows=[learner_row(24)], versions=[0, 10, 20])
    assert condition(conditions(done), "Published").reason == "Behind"


def test_summary_and_report_of_a_run_on_documents(
    documents: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    summary = write_summary(documents, 95.0)
    assert summary is not None
    assert (summary["tokens"], summary["trained_tokens"]) == (12 * 1900, 12 * 1800)
    assert summary["nll_first"] == pytest.approx(3.0 - 0.45)
    assert summary["held_out_nll_first"] == pytest.approx(2.8)
    assert summary["held_out_nll_last"] == pytest.approx(2.3)
    assert (summary["input_wait_share"], summary["epoch"]) == (pytest.approx(0.1), 3.0)
    # and the page has the plots of such a run, and no rewards
    page = report(documents / REPORT_FILE)
    found = {figure["title"] for figures in page["figures"].values() for figure in figures}
    assert {"Loss", "Held-out loss", "Bits a byte", "Gradient norm", "MFU"} <= found
    assert "22,800 tokens, 3 epochs" in page["head"]["work"]
    shown = json.dumps([page["head"]["ends"], page["head"]["facts"], page["figures"]])
    assert "eward" not in shown and "rollout" not in shown
    show_result(documents)
    assert "Bits a byte" in capsys.readouterr().out
    # and measurements after steps 4 and 9 are the evaluation held-out of versions 5 and 10
    for evaluations in (read_status(documents)["evaluations"], summary["evaluations"]):
        held_out = evaluations["held-out"]
        assert [(each["version"], each["loss"][0]) for each in held_out] == [
            *((5, pytest.approx(2.8)), (10, pytest.approx(2.3)))
        ]
        assert held_out[-1]["bits-per-byte"] == [pytest.approx(1.3), None, None]
    for text, missed in {"<2.5": 0, ".loss<2.1": 1, ".bits-per-byte<1.5": 0, ".mean>0": 1}.items():
        awaited = f"evaluation:held-out{text}"
        assert wait_command(documents.name, awaited, 0.0, documents.parent) == missed, text


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


def test_a_step_names_the_islands_that_are_missing_and_what_was_waited_for() -> None:
    # given 1,000 tokens in 4 s, which are a quarter of the islands'
    line = step_line([island_row(0)], 9)
    assert "  1,000 tok/s  MFU 41 %  waited 25 %, most for the islands  islands 3/3" in line
    assert step_line([DROPPED], 9).endswith("  islands 2/3 without c")
    # and an island that is not in the mean knows no sum
    alone = step_line(
        [island_row(0, contributors=["b"], dropped={"a": "x", "c": "y"}, part=None)], 9
    )
    assert "  - tok/s" in alone and alone.endswith("islands 1/3 without a, c")
    # and the input is still what a run with one learner waits for
    assert step_line([learner_row(0)], 9).endswith("waited for input 10 %")


def test_status_description_and_panel_say_what_the_exchange_cost(
    islands: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status_command("reads", False, islands.parent)
    status = capsys.readouterr().out
    describe_command("reads", islands.parent)
    described, shown = capsys.readouterr().out, list[Any]()

    class Screen:
        console = Console(width=120)

        def update(self, group: Any, *, refresh: bool) -> None:
            shown.append(group)

    LiveView("reads", 9, Screen()).show([DROPPED], [], "")  # type: ignore[arg-type]
    with Screen.console.capture() as panel:
        Screen.console.print(shown[0])
    assert all(part in panel.get() for part in ("of all islands", "most for the islands"))
    for text in (f"c: {WHY}", "norm 3, cosine to the others' 0.5"):
        assert all(text in each for each in (status, described, panel.get()))
    for text in (
        "step 1, shares of a, b",
        "4 MB up to each island that fetches it, 4 MB down",
        "waited for 0.8 s of the step (20 %); busy 75 %",
        "about 1,000 tokens/s",
    ):
        assert text in status and text in described
    found = read_status(islands)["islands"]
    assert (found["dropped"], found["tokens_per_s"]) == ({"c": WHY}, 1000.0)
    assert (found["wait_s"], found["wait_share"], found["busy"]) == (0.8, 0.2, 0.75)


def test_the_summary_sums_up_the_exchange(islands: Path) -> None:
    summary = write_summary(islands, 8.0)
    # then bytes of shares are not counted as weights
    assert summary is not None
    assert summary["weights_bytes_sent"] == weights_bytes_sent(islands) == 12
    assert summary["islands"] == {
        "dropped": {"c": 1},
        "share_bytes": 4_000_000,
        "sent_bytes": 78,
        "received_bytes": 12_000_000,
        "share_norm_first": 2.5,
        "share_norm_last": 2.5,
        "cosine_first": 0.5,
        "cosine_last": 0.5,
        "wait_share": pytest.approx(0.2),
        "tokens_per_s": 1000.0,
    }
    assert summary["input_wait_share"] == pytest.approx(0.05)
    page = report(islands / REPORT_FILE)
    assert {"Agreement", "Contributors"} <= {plot["title"] for plot in page["figures"]["Islands"]}
    facts = [text for _, text in page["head"]["facts"]]
    assert "c in 1 steps" in facts and "78 B / 12 MB" in facts


def test_islands_that_are_waited_for_are_named(
    islands: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # given a live run whose coordinator lacks the share of c
    save_endpoints(islands, Endpoints("http://127.0.0.1:1", "http://127.0.0.1:2", {}))
    members = [{"name": name, "offered": name != "c"} for name in "abc"]
    told = {"committed": 1, "waiting_for": {"c": "no share offered"}, "members": members}
    module = import_module("runspec.cli.status")
    monkeypatch.setattr(module, "coordinator_status", lambda url: {"islands": told})
    text = "for the shares of step 1 (c: no share offered)"
    # then it is shown while the run is up
    with hold(islands):
        status_command("reads", False, islands.parent)
        assert f"waits {text}\n" in capsys.readouterr().out
        describe_command("reads", islands.parent)
        assert text in capsys.readouterr().out
        # but not while all train, nor once nobody holds the run
        told["members"] = [{**member, "offered": False} for member in members]
        status_command("reads", False, islands.parent)
    told["members"] = members
    status_command("reads", False, islands.parent)
    assert "waits for" not in capsys.readouterr().out
