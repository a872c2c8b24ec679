"""The estimate of runs that train on documents."""

from __future__ import annotations

import json
from io import StringIO

import pytest
from rich.console import Console

from runspec.cli.estimate_view import show_estimate
from runspec.core.errors import UserError
from runspec.core.models.flops import forward_flops, useful_flops
from runspec.core.models.spec_model import model_config
from runspec.core.spec.schema import RunSpec
from runspec.estimate.run import RunEstimate, estimate_run, forecast
from runspec.estimate.speed import step_seconds
from runspec.simulate.run import simulate
from tests.runspec.supervised import supervised_spec


def estimated(spec: RunSpec) -> RunEstimate:
    return estimate_run(spec, model_config(spec))


def shown(spec: RunSpec) -> str:
    out = StringIO()
    show_estimate(estimated(spec), Console(file=out, width=80, highlight=False))
    return out.getvalue()


def test_a_step_is_its_updates_on_full_rows_and_a_share_of_the_held_out_tokens() -> None:
    # given 25 steps of 2 updates of 1,024 tokens, rows of 64 tokens, 4,096 held out every 5 steps
    spec = supervised_spec()
    config = model_config(spec)
    assert config is not None
    # when it is estimated
    estimate = estimated(spec)
    # then a step has 32 full rows with a backward pass, and 64 / 5 rows without
    flops, run = estimate.learner.flops, estimate.supervised
    assert flops is not None and run is not None
    assert flops.useful == pytest.approx(32 * useful_flops(config, [64]))
    assert flops.forward == pytest.approx(64 / 5 * forward_flops(config, [64]))
    assert (run.updates, run.microbatches, run.step_tokens, run.run_tokens) == (2, 4, 2048, 51_200)
    # and its time is that of the learner alone, at .4 of 2 x 1 GFLOP/s
    step_s = (flops.useful + flops.forward) / (0.4 * 2e9)
    assert estimate.learner.step_s == pytest.approx(step_s)
    assert step_seconds(spec, config) == estimate.learner.step_s
    assert estimate.run_s == pytest.approx(25 * step_s)
    assert forecast(spec, config) == (estimate.learner.step_s, estimate.learner.step_s)
    assert run.run_flops == pytest.approx(25 * flops.total)
    # and there are versions 0, 10, 20 and 25, and nobody who fetches them
    assert run.versions == 4
    assert (estimate.samplers, estimate.validators, estimate.timeline) == ((), 0, None)
    json.dumps(estimate.to_json(), allow_nan=False)


def test_the_learner_holds_no_version_and_the_batch_of_one_update() -> None:
    memory = estimated(supervised_spec()).learner.memory
    larger = estimated(supervised_spec(algorithm={"tokens_per_update": 4096})).learner.memory
    adapters = estimated(supervised_spec(learner={"lora": {"rank": 2}})).learner.memory
    assert memory is not None and larger is not None and adapters is not None
    assert (memory.published, memory.reference) == (0.0, 0.0)
    assert adapters.reference > 0.0
    # tokens, segments, positions, targets and weights of the 3,072 more, 4 bytes each, on 2 devices
    assert larger.total - memory.total == 5 * 4 * 3072 / 2


def test_tokens_flops_time_versions_and_cost_are_shown() -> None:
    hardware = {"kind": "cpu", "count": 2, "peak_flops": 1e9, "price_per_hour": 3.0}
    text = shown(supervised_spec(learner={"hardware": hardware}))
    for part in (
        "2.05 k tokens a step",
        "2 updates of 4 microbatches",
        "25 steps",
        "51.2 k",
        "of the FLOPs measure held-out loss",
        "a version every 10 steps, 4 in all",
        "6.00 an hour",
        "learner.packing.tokens: documents fill rows",
    ):
        assert part in text, part
    for part in ("Samplers", "Broadcast", "prompt", "idle"):
        assert part not in text, part


def test_an_unknown_peak_is_named() -> None:
    text = shown(supervised_spec(learner={"hardware": {"kind": "cpu", "count": 2}}))
    assert "  learner.hardware.peak_flops" in text
    assert "51.2 k" in text


def test_there_is_nothing_to_simulate() -> None:
    spec = supervised_spec()
    with pytest.raises(UserError, match="a run of kind pretrain has no workers to simulate"):
        simulate(spec, model_config(spec))
