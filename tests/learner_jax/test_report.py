"""A step's line of metrics by hand-computed numbers, its FLOPs, and the files of lines."""

from __future__ import annotations

import json
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from learner_jax.batch import Agreement, Batch, TrainingRollout
from learner_jax.metrics import CLIPPED, GAUGES, Clock, JsonLines, Rows
from learner_jax.model import abstract_params, bind
from learner_jax.packing import TokenBatch
from learner_jax.recipes import peak_flops, rollouts_line, work_line
from learner_jax.sharding import Execution
from learner_jax.step import policy_logprobs
from learner_jax.training import StepResult
from runspec.core.errors import UserError
from runspec.core.models import ModelConfig
from runspec.core.models.parameters import matrix_parameters, useful_flops
from runspec.core.schema import Lora
from tests.figures import figures_of
from tests.harness import ROOT
from verify.formats.batch import BatchManifest

CONFIG = ModelConfig("qwen2", 40, 24, 56, 3, 4, 2, 10, 64, 10000.0, 1e-6, False, True)
STATS = {
    "task_reward_mean": 0.5,
    "accepted_tokens_per_s": 70.0,
    "sampler_busy_fraction": None,
    "verdict_latency_p50": 1.0,
    "verdict_latency_p99": 2.0,
    "manifest_latency_p50": 3.0,
    "manifest_latency_p99": 4.0,
}


def rollout(prompt: int, output: int, version: int) -> TrainingRollout:
    arrays = [np.zeros(n, np.int32) for n in (prompt, output)]
    return TrainingRollout("p", *arrays, np.zeros(output, np.float32), 1.0, 1.0, 1.0, None, version)


def line_of(
    waits: dict[str, float], peak: float | None = 1e9, agreement: Agreement | None = None
) -> dict[str, Any]:
    """Of step 3: two groups of lags 0, 1, 2, 1; 90 tokens in 120 positions; 1.5 of 2 s updates."""
    batch = Batch(
        BatchManifest("tiny", 3, [], True, STATS, 1, "0" * 64),
        [[rollout(5, 10, 3), rollout(5, 20, 2)], [rollout(10, 10, 1), rollout(10, 20, 2)]],
        agreement,
    )
    numbers = {"loss": 0.25, "ratio_p99": 1.5}
    result = StepResult(None, numbers, (), tokens=90, padding_share=0.25, update_s=1.5)
    useful = useful_flops(CONFIG, [15, 25, 20, 30])
    work = work_line(result, useful, None if peak is None else 2 * peak, 2.0, waits)
    return {"version": 4, **work, **rollouts_line(batch, 0.25, 1e-3)}


def test_a_line_has_speed_lag_loss_and_what_the_coordinator_saw():
    line, useful = line_of({}), useful_flops(CONFIG, [15, 25, 20, 30])
    # then speed counts real tokens and useful FLOPs
    assert (line["tokens_per_s"], line["padding_share"]) == (45.0, 0.25)
    assert line["mfu"] == pytest.approx(useful / (2.0 * 2e9))
    assert line["mfu_update"] == pytest.approx(useful / (1.5 * 2e9))
    assert (line["train_s"], line["score_s"], line["update_s"]) == (2.0, 0.25, 1.5)
    unknown = line_of({}, peak=None)
    assert (unknown["mfu"], unknown["mfu_update"]) == (None, None)
    # and lags and loss are of what was trained
    assert line["lag_histogram"] == {"0": 1, "1": 2, "2": 1}
    assert (line["lag_mean"], line["lag_max"], line["trained_rollouts"]) == (1.0, 2, 4)
    assert (line["version"], line["loss"], line["ratio_p99"]) == (4, 0.25, 1.5)
    # and the coordinator's numbers are passed on, null where it had none
    assert (line["task_reward"], line["sampler_tokens_per_s"]) == (0.5, 70.0)
    assert [line[name] for name in STATS if "latency" in name] == [1.0, 2.0, 3.0, 4.0]
    assert line["sampler_busy_fraction"] is line["rejected_submissions"] is None


def test_idle_time_is_split_by_what_it_waited_for():
    names = ("wait_s", "waited_for", "learner_busy_fraction", "waits")
    waits = {"checkpoint": 0.5, "coordinator": 1.5}
    line, busy = line_of(waits), line_of({})
    assert [line[name] for name in names] == [2.0, "coordinator", 0.5, waits]
    assert [busy[name] for name in names] == [0.0, None, 1.0, {}]


@pytest.mark.parametrize(
    ("mean", "alarm"), [(None, False), (1e-3, False), (2e-3, True), (float("nan"), True)]
)
def test_samplers_that_are_further_off_than_allowed_raise_the_alarm(mean, alarm):
    line = line_of({}, agreement=None if mean is None else Agreement(90, mean, 0.5))
    assert line["sampler_logprob_diff_max"] == (None if mean is None else 0.5)
    assert (line["sampler_logprob_limit"], line["sampler_logprob_alarm"]) == (1e-3, alarm)


def test_prometheus_sees_the_newest_row_and_the_sums_of_all():
    # given two steps
    rows = Rows()
    rows.trained({"step": 2, **line_of({"coordinator": 1.0, "checkpoint": 0.5}), "loss": 9.0})
    row = {**line_of({"coordinator": 2.0}), "clip_fraction_low": 0.25}
    rows.trained({"step": 3, **row})
    found = figures_of(rows)
    # then figures are the newest row's, what it does not know is not there, and totals are of both
    shown = {"step": 3.0, "loss": 0.25, "task_reward": 0.5, "logprob_alarm": 0.0}
    totals = {"steps_total": 2.0, "tokens_total": 180.0, "busy_seconds_total": 4.0}
    waits = {"coordinator": 3.0, "checkpoint": 0.5}
    expected = {
        **shown,
        "clipped_ratio/low": 0.25,
        **dict.fromkeys(["reward", "entropy_nats"]),
        **totals,
        **{f"wait_seconds_total/{name}": seconds for name, seconds in waits.items()},
    }
    assert {name: found.get(f"runspec_learner_{name}") for name in expected} == expected


def test_the_keys_that_prometheus_sees_are_those_of_the_page():
    pages = [(ROOT / "docs" / name).read_text() for name in ("learner_jax.md", "documents.md")]
    table = "\n".join(line for page in pages for line in page.splitlines() if line[:1] == "|")
    told = {*line_of({}), "step"}
    for key in (*GAUGES, *CLIPPED.values()):
        first, _, last = key.rpartition("_")
        named = f"`{key}`" in table or (f"`{first}_" in table and f"`_{last}`" in table)
        assert key in told or named, key


METAGENE = ModelConfig("llama", 1024, 4096, 11008, 32, 32, 32, 128, 512, 10000.0, 1e-5, False)


def product_flops(jaxpr: Any) -> int:
    """FLOPs of a program's products of matrices, those of a loop as often as it runs."""
    total = 0
    for each in jaxpr.eqns:
        inner = [p.jaxpr for p in each.params.values() if hasattr(p, "jaxpr")]
        total += each.params.get("length", 1) * sum(map(product_flops, inner))
        if each.primitive.name == "dot_general":
            (contracted, _), _ = each.params["dimension_numbers"]
            left = each.invars[0].aval.shape
            total += 2 * each.outvars[0].aval.size * math.prod(left[axis] for axis in contracted)
    return total


def test_the_forward_third_of_useful_flops_is_what_the_program_multiplies():
    # given a row that one sample fills, and attention that computes the masked half as well
    n = 48
    params = jax.tree.map(
        lambda spec: jax.ShapeDtypeStruct(spec.shape, jnp.float32), abstract_params(CONFIG)
    )
    ids = jax.ShapeDtypeStruct((1, n), jnp.int32)

    def forward(params: Any, batch: TokenBatch) -> Any:
        return policy_logprobs(bind(CONFIG, params), batch, Execution(jnp.float32), temperature=1.0)

    # when the products of matrices in the traced log-probs are counted
    found = product_flops(jax.make_jaxpr(forward)(params, TokenBatch(ids, ids, ids, ids)).jaxpr)
    # then they are a third of an update's, and the masked half
    masked = 2 * 3 * (4 * 10) * n**2
    assert found == useful_flops(CONFIG, [n]) / 3 + masked


def test_useful_flops_are_those_of_matrices_attention_and_adapters():
    # given METAGENE-1's 6,484,660,224 parameters: what is no matrix is the embedding and 65 norms
    assert matrix_parameters(METAGENE) == 6_484_660_224 - 1024 * 4096 - 65 * 4096
    # given the same tokens in one sample and in four, then only attention differs
    one, four = (useful_flops(METAGENE, lengths) for lengths in ([512], [128] * 4))
    assert one - four == 6 * 32 * 4096 * (512**2 - 4 * 128**2)
    # given adapters of rank 8 on two of a layer's matrices, [24, 40] and [56, 24], then the
    # gradients of the matrices are spared
    adapters = 3 * 8 * (24 + 40 + 56 + 24)
    expected = useful_flops(CONFIG, [48]) - 2 * matrix_parameters(CONFIG) * 48 + 6 * adapters * 48
    assert useful_flops(CONFIG, [48], Lora(rank=8, targets=["q", "down"])) == expected


def test_peaks_of_devices_as_they_call_themselves():
    kinds = ("TPU v5 lite", "TPU v5", "NVIDIA H100 80GB HBM3", "NVIDIA H100 PCIe")
    assert [peak_flops(kind) for kind in kinds] == [197e12, 459e12, 989e12, 756e12]
    assert peak_flops("cpu") is None


def test_lines_are_appended_once_a_step(tmp_path):
    # given a file with two steps, the second with two lines
    path = tmp_path / "metrics.jsonl"
    lines = JsonLines(path)
    assert lines.append(0, [{"loss": 1.0}]) and lines.append(1, [{"loss": 0.5}, {"loss": 0.4}])
    # when the learner starts again and replays step 1, then nothing is there twice
    again = JsonLines(path)
    assert again.last_step == 1
    assert not again.append(1, [{"loss": 0.5}]) and again.append(2, [{"loss": 0.3}])
    found = [json.loads(line)["step"] for line in path.read_text().splitlines()]
    assert found == [0, 1, 1, 2]


def test_a_torn_last_line_is_dropped_wherever_it_was_cut(tmp_path):
    path = tmp_path / "metrics.jsonl"
    whole = b'{"step": 0, "loss": 1.5}\n'
    torn = b'{"step": 1, "text": "' + b"x" * 70_000 + b'"}\n'
    for cut in (1, 2, 30, 66_000, len(torn) - 1):
        path.write_bytes(whole + torn[:cut])
        assert JsonLines(path).last_step == 0
        assert path.read_bytes() == whole
    path.write_bytes(torn[:40])
    assert JsonLines(path).last_step == -1
    assert path.read_bytes() == b""


def test_a_full_disk_and_a_file_that_is_not_ours_are_named(tmp_path):
    full, foreign = tmp_path / "full.jsonl", tmp_path / "metrics.jsonl"
    full.symlink_to("/dev/full")
    with pytest.raises(UserError, match=r"cannot write: No space left") as caught:
        JsonLines(full).append(0, [{"loss": 1.0}])
    assert caught.value.place == str(full)
    foreign.write_bytes(b"hello\n")
    with pytest.raises(UserError, match=r"not one of ours") as caught:
        JsonLines(foreign)
    assert caught.value.place == str(foreign)
    assert foreign.read_bytes() == b"hello\n"


def test_each_second_is_work_or_a_wait_for_somebody():
    # given a clock made at 10 s, and a step that waits twice for one and once for another
    moments = iter([10.0, 13.0, 14.0, 16.0, 16.5, 17.5, 21.0])
    clock = Clock(lambda: next(moments))
    for name in ("coordinator", "", "checkpoint", "", "coordinator"):  # 3, 1, 2, 0.5, 1
        clock.waited(name) if name else clock.trained()
    # when taken, then every second is there once, and the next step begins with none
    assert clock.take() == (1.5, {"coordinator": 4.0, "checkpoint": 2.0})
    clock.trained()
    assert clock.take() == (3.5, {})
