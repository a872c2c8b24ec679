"""metrics.jsonl as it grows, and the summary by hand-computed numbers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from runspec.core.spec.resolved import dump_resolved
from runspec.local.metrics import (
    JsonLines,
    read_rows,
    summarise,
    time_left_s,
    weights_bytes_sent,
)
from runspec.local.report import write_summary
from tests.runspec.local.fake_run import small_spec


def test_the_time_that_is_left_goes_by_the_median_of_the_newest_steps() -> None:
    # given steps of 2 s, one of which took long
    times = [0.0, 2.0, 4.0, 100.0, 102.0, 104.0]
    rows = [{"step": step, "time": at} for step, at in enumerate(times)]
    assert time_left_s(rows, 16) == 20.0
    assert time_left_s(rows, 6) == 0.0
    assert time_left_s(rows[:2], 16) is None


def test_only_whole_new_lines_are_read(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = JsonLines(path)
    assert lines.new_rows() == []
    path.write_text('{"step": 0}\n{"st')
    assert lines.new_rows() == [{"step": 0}]
    assert lines.new_rows() == []
    with path.open("a") as file:
        file.write('ep": 1}\n')
    assert lines.new_rows() == [{"step": 1}]


def test_a_torn_line_is_left_out_and_a_cut_file_read_anew(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0}\n{"st{"step": 1}\n[1]\n{"step": 2}\n')
    lines = JsonLines(path)
    assert lines.new_rows() == [{"step": 0}, {"step": 2}]
    path.write_text('{"step": 0, "again": true}\n')
    assert lines.new_rows() == [{"step": 0, "again": True}]


def test_a_step_trained_again_counts_once_by_its_last_row(tmp_path: Path) -> None:
    rows = [{"step": 0, "x": 1}, {"step": 1, "x": 1}, {"step": 1, "x": 2}, {"step": 2, "x": 1}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert [row["x"] for row in read_rows(tmp_path)] == [1, 2, 1]


def test_numbers_that_are_not_finite_are_null_in_the_summary(tmp_path: Path) -> None:
    # given a step that diverged, in each of the ways that a JSON number can fail to be finite
    (tmp_path / "spec.json").write_bytes(dump_resolved(small_spec()))
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 0, "reward": -1.5, "length_error": 2.0}\n'
        '{"step": 1, "reward": NaN, "length_error": Infinity, "lag_max": 1e999, "train_s": NaN,'
        ' "by_target": {"8": {"length_mean": -Infinity}}}\n'
    )
    # when the run is summed up
    second = read_rows(tmp_path)[1]
    summary = write_summary(tmp_path, 1.0)
    # then those are null, the finite ones count, and the file is strict JSON
    assert (second["reward"], second["by_target"]) == (None, {"8": {"length_mean": None}})
    written = json.loads((tmp_path / "summary.json").read_text(), parse_constant=pytest.fail)
    assert written == summary
    assert (written["reward_last"], written["length_error_last"]) == (-1.5, 2.0)
    assert written["max_lag"] is None


def test_the_summary_of_twelve_steps() -> None:
    # given twelve steps: task reward .0 .1 .. 1.1, lag 0 but for the last, which is half as large
    rows = [
        {
            "step": step,
            "task_reward": step / 10,
            "reward": -1.0,
            "length_error": 24.0 - step,
            "lag_mean": 0.0 if step < 11 else 1.5,
            "lag_max": 0 if step < 11 else 2,
            "trained_rollouts": 128 if step < 11 else 64,
            "accepted_rollouts": 128,
            "rejected_rollouts": 1 if step == 3 else 0,
            "train_s": 1.0 if step else 3.0,
            "tokens_per_s": 100.0 if step else 20.0,
            "mfu": None if step < 10 else 0.25 * (step - 9),
            "skipped_updates": 1.0 if step == 5 else 0.0,
            "wait_s": 0.0 if step else 12.0,
            "learner_busy_fraction": 1.0 if step else 1 / 13,
            "sampler_busy_fraction": None if step == 0 else 0.5,
            "verdict_latency_p50": None if step == 0 else 2.0,
            "manifest_latency_p99": None if step == 0 else float(step),
        }
        for step in range(12)
    ]
    summary = summarise(rows, wall_s=30.12345, weights_bytes_sent=77)
    assert summary["steps"] == 12
    assert summary["task_reward_first"] == pytest.approx(0.45)  # 0.0 .. 0.9
    assert summary["task_reward_last"] == pytest.approx(0.65)  # 0.2 .. 1.1
    assert summary["length_error_first"] == pytest.approx(19.5)  # 24 .. 15
    assert summary["length_error_last"] == pytest.approx(17.5)  # 22 .. 13
    assert summary["reward_last"] == -1.0
    assert summary["rollouts_accepted"] == 1536
    assert summary["rollouts_rejected"] == 1
    assert summary["max_lag"] == 2
    assert summary["mean_lag"] == pytest.approx(1.5 * 64 / (11 * 128 + 64))
    assert summary["learner_busy_fraction"] == pytest.approx((11 + 15 / 13) / 26)  # of 26 s
    assert summary["learner_tokens_per_s"] == pytest.approx((11 * 100 + 3 * 20) / 14)
    assert summary["mfu"] == pytest.approx(0.375)  # of the two steps that have it
    assert summary["skipped_updates"] == 1
    assert summary["sampler_busy_fraction"] == pytest.approx(0.5)
    assert (summary["verdict_latency_p50"], summary["manifest_latency_p99"]) == (2.0, 11.0)
    assert summary["verdict_latency_p99"] is None
    assert (summary["wall_s"], summary["weights_bytes_sent"]) == (30.123, 77)


def test_served_bytes_are_summed_over_origin_and_relays(tmp_path: Path) -> None:
    for store, served in (("origin", '{"bytes": 5}'), ("relay-a", '{"bytes": 7}'), ("b", "torn{")):
        (tmp_path / "store" / store).mkdir(parents=True)
        (tmp_path / "store" / store / "served.json").write_text(served)
    assert weights_bytes_sent(tmp_path) == 12
