"""What a run has to show, as items with keys and digests."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from runspec.local.monitors.feed import Feed, evaluation_item, last_keys, samples_item, step_item
from tests.runspec.local.fake_run import small_spec
from tests.runspec.local.monitors.logged_run import LoggedRun, row, sample
from tests.runspec.local.test_evaluations import ZERO


def test_a_step_has_every_number_of_its_row_by_name() -> None:
    item = step_item(
        {
            "step": 7,
            "version": 8,
            "time": 5.0,
            "loss": 0.5,
            "complete": True,
            "mfu": None,
            "waited_for": "input",
            "lag_histogram": {"0": 3, "1": 1},
            "by_target": {"8": {"length_mean": 9.0}},
        }
    )
    assert (item.key, item.axis, item.at, item.time) == ("step:7", "step", 7, 5.0)
    assert item.scalars == {
        "loss": 0.5,
        "complete": 1.0,
        "lag_histogram/0": 3.0,
        "lag_histogram/1": 1.0,
        "by_target/8/length_mean": 9.0,
    }


def test_an_evaluation_has_its_figures_and_their_intervals() -> None:
    item = evaluation_item(replace(ZERO, version=10))
    assert (item.key, item.axis, item.at) == ("evaluation:held-out:10", "version", 10)
    assert item.scalars["evaluations/held-out/mean"] == 0.25
    assert item.scalars["evaluations/held-out/mean/low"] == 0.2
    assert item.scalars["evaluations/held-out/mean/high"] == 0.3
    assert "evaluations/held-out/length/low" not in item.scalars  # of one problem only


def test_long_texts_of_a_rollout_are_cut() -> None:
    item = samples_item(0, [{"output": "x" * 9000, "target": 3, "extra": {"a": 1}}], 1.0)
    [cut] = item.rollouts
    assert cut == {"output": "x" * 4000 + " ... (9000 characters)", "target": 3, "extra": None}


def test_another_content_has_another_digest() -> None:
    assert step_item(row(1)) == step_item(json.loads(json.dumps(row(1))))
    assert step_item(row(1)).digest != step_item(row(1, attempt=2)).digest


def test_each_thing_is_seen_once_and_samples_once_their_step_is_whole(tmp_path: Path) -> None:
    # given a run with steps 0 to 10 and two evaluations
    run = LoggedRun(tmp_path / "run", "kind: tensorboard")
    run.train(range(11))
    run.evaluate(0, 10)
    feed = Feed(run.path)
    # when it is looked at, then the newest step may get more samples
    first = [item.key for item in feed.look(last=False)]
    evaluations = ["evaluation:held-out:0", "evaluation:held-out:10"]
    assert first == [*(f"step:{step}" for step in range(11)), "samples:0", *evaluations]
    # and they come with the next step, with its time, or at the end
    assert feed.look(last=False) == []
    run.train([11])
    step, samples = feed.look(last=False)
    assert (step.key, samples.key) == ("step:11", "samples:10")
    assert len(samples.rollouts) == 2 and samples.time == 1.7e9 + 10
    late = Feed(run.path)
    run.roll_back(11)
    assert "samples:10" in [item.key for item in late.look(last=True)]


def test_a_run_is_shown_once_its_last_step_and_evaluations_are() -> None:
    evaluations = "evaluations=[{name: held-out}, {name: b, at_end: false}]"
    assert last_keys(small_spec("small", 5, evaluations)) == {"step:4", "evaluation:held-out:5"}
    assert last_keys(small_spec("small", 5, "evaluations=null")) == {"step:4"}


def test_lines_that_are_no_steps_are_left_out(tmp_path: Path) -> None:
    run = LoggedRun(tmp_path / "run", "kind: tensorboard")
    lines = [{"loss": 1.0}, {"step": True}, {"step": -1}, sample(20, 0)]
    (run.path / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))
    assert [item.key for item in Feed(run.path).look(last=True)] == ["step:20"]
