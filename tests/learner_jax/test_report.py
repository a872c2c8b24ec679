"""A step's line of metrics, by hand-computed numbers."""

from __future__ import annotations

import numpy as np
import pytest

from learner_jax.agreement import Agreement
from learner_jax.batch import Batch, TrainingRollout
from learner_jax.figures import CLIPPED, GAUGES, Rows
from learner_jax.report import Meter, metrics_line
from learner_jax.training import StepResult
from runspec.core.models.config import ModelConfig
from runspec.core.models.flops import useful_flops
from tests.figures import figures_of
from tests.harness import ROOT
from verify.formats.batch import BatchManifest

CONFIG = ModelConfig("qwen2", 40, 24, 56, 3, 4, 2, 10, 64, 10000.0, 1e-6, False, True)


def rollout(prompt: int, output: int, version: int) -> TrainingRollout:
    return TrainingRollout(
        problem_id="p",
        prompt_tokens=np.zeros(prompt, np.int32),
        output_tokens=np.zeros(output, np.int32),
        mu=np.zeros(output, np.float32),
        advantage=1.0,
        task_reward=1.0,
        reward=1.0,
        target=None,
        version=version,
    )


STATS = {
    "task_reward_mean": 0.5,
    "accepted_tokens_per_s": 70.0,
    "sampler_busy_fraction": None,
    "verdict_latency_p50": 1.0,
    "verdict_latency_p99": 2.0,
    "manifest_latency_p50": 3.0,
    "manifest_latency_p99": 4.0,
}


def line_of(
    waits: dict[str, float], peak: float | None = 1e9, agreement: Agreement | None = None
) -> dict:
    """Of step 3: two groups of lags 0, 1, 2, 1; 90 tokens in 120 positions; 1.5 of 2 s updates."""
    batch = Batch(
        BatchManifest("tiny", 3, [], True, STATS, 1, "0" * 64),
        [[rollout(5, 10, 3), rollout(5, 20, 2)], [rollout(10, 10, 1), rollout(10, 20, 2)]],
        agreement,
    )
    result = StepResult(
        state=None,
        numbers={"loss": 0.25, "ratio_p99": 1.5},
        skipped=(),
        tokens=90,
        positions=120,
        score_s=0.25,
        update_s=1.5,
    )
    meter = Meter(CONFIG, None, devices=2, peak=peak)
    return metrics_line(batch, result, meter, train_s=2.0, waits=waits, logprob_alarm=1e-3)


def test_speed_counts_real_tokens_and_useful_flops() -> None:
    line, useful = line_of({}), useful_flops(CONFIG, [15, 25, 20, 30])
    assert line["tokens_per_s"] == 45.0
    assert line["padding_share"] == 0.25
    assert line["mfu"] == pytest.approx(useful / (2.0 * 2e9))
    assert line["mfu_update"] == pytest.approx(useful / (1.5 * 2e9))
    assert (line["train_s"], line["score_s"], line["update_s"]) == (2.0, 0.25, 1.5)
    unknown = line_of({}, peak=None)
    assert (unknown["mfu"], unknown["mfu_update"]) == (None, None)


def test_idle_time_is_split_by_what_it_waited_for() -> None:
    line = line_of({"checkpoint": 0.5, "coordinator": 1.5})
    assert (line["wait_s"], line["waited_for"]) == (2.0, "coordinator")
    assert line["waits"] == {"checkpoint": 0.5, "coordinator": 1.5}
    assert line["learner_busy_fraction"] == 0.5
    busy = line_of({})
    assert (busy["wait_s"], busy["waited_for"], busy["learner_busy_fraction"]) == (0.0, None, 1.0)


def test_lags_and_the_loss_are_those_of_what_was_trained() -> None:
    line = line_of({})
    assert line["lag_histogram"] == {"0": 1, "1": 2, "2": 1}
    assert (line["lag_mean"], line["lag_max"], line["trained_rollouts"]) == (1.0, 2, 4)
    assert (line["version"], line["loss"], line["ratio_p99"]) == (4, 0.25, 1.5)
    assert line["task_reward"] == 0.5


def test_what_the_coordinator_saw_is_passed_on_and_what_it_did_not_is_null() -> None:
    line = line_of({})
    assert (line["sampler_tokens_per_s"], line["sampler_busy_fraction"]) == (70.0, None)
    assert [line[name] for name in STATS if "latency" in name] == [1.0, 2.0, 3.0, 4.0]
    assert line["rejected_submissions"] is None  # not in these statistics


@pytest.mark.parametrize(
    ("mean", "alarm"), [(9e-4, False), (1e-3, False), (2e-3, True), (float("nan"), True)]
)
def test_samplers_that_are_further_off_than_allowed_raise_the_alarm(
    mean: float, alarm: bool
) -> None:
    line = line_of({}, agreement=Agreement(90, mean, 0.5))
    assert line["sampler_logprob_diff_max"] == 0.5
    assert (line["sampler_logprob_limit"], line["sampler_logprob_alarm"]) == (1e-3, alarm)


def test_a_step_in_which_nothing_was_recomputed_raises_no_alarm() -> None:
    line = line_of({})
    assert line["sampler_logprob_diff_mean"] is None
    assert line["sampler_logprob_alarm"] is False


def test_prometheus_sees_the_newest_row_and_the_sums_of_all() -> None:
    # given two steps
    rows = Rows()
    rows.trained({"step": 2, **line_of({"coordinator": 1.0, "checkpoint": 0.5}), "loss": 9.0})
    row = {**line_of({"coordinator": 2.0}), "clip_fraction_low": 0.25}
    rows.trained({"step": 3, **row})
    found = figures_of(rows)
    # then figures are the newest row's, and what it does not know is not there
    assert found["runspec_learner_step"] == 3.0 and found["runspec_learner_loss"] == 0.25
    assert found["runspec_learner_task_reward"] == 0.5
    assert found["runspec_learner_logprob_alarm"] == 0.0
    assert found["runspec_learner_clipped_ratio/low"] == 0.25
    assert "runspec_learner_reward" not in found and "runspec_learner_entropy_nats" not in found
    # and totals are of both
    assert found["runspec_learner_steps_total"] == 2.0
    assert found["runspec_learner_tokens_total"] == 180.0
    assert found["runspec_learner_busy_seconds_total"] == 4.0
    assert found["runspec_learner_wait_seconds_total/coordinator"] == 3.0
    assert found["runspec_learner_wait_seconds_total/checkpoint"] == 0.5


def test_the_keys_that_prometheus_sees_are_those_of_the_page() -> None:
    pages = [(ROOT / "docs" / name).read_text() for name in ("learner_jax.md", "documents.md")]
    table = "\n".join(line for page in pages for line in page.splitlines() if line[:1] == "|")
    told = {*line_of({}), "step"}
    for key in (*GAUGES, *CLIPPED.values()):
        first, _, last = key.rpartition("_")
        assert (
            key in told or f"`{key}`" in table or (f"`{first}_" in table and f"`_{last}`" in table)
        )
