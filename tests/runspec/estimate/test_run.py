"""The estimate of a whole run: of a fleet, of one learner on documents, and of islands."""

from __future__ import annotations

import json
from io import StringIO
from math import prod
from statistics import fmean, stdev

import pytest
from rich.console import Console

from bridge.weight_map import hf_shapes
from runspec.cli.estimate_view import show_estimate
from runspec.core.errors import UserError
from runspec.core.models.family import model_config
from runspec.core.models.parameters import forward_flops, useful_flops
from runspec.core.schema import RunSpec
from runspec.estimate.assumed import REPORT_TRIPS, ROUND_TRIPS, SHARE_BYTES_S, cost
from runspec.estimate.broadcast import IslandsEstimate
from runspec.estimate.speed import step_seconds
from runspec.plan.estimate import RunEstimate, estimate_run
from runspec.simulate import draws
from runspec.simulate.run import simulate
from tests.runspec.supervised import shipped, supervised_spec

FLEET = (
    "samplers.volunteers={replicas: 12, download: 590Mbit/s, hardware: {price_per_hour: 2.0}}",
    "broadcast.origin.upload=1Gbit/s",
)
UNKNOWN = (
    "learner.hardware.peak_flops=null",
    "samplers.volunteers.tokens_per_s=null",
    "verify.tokens_per_s=null",
)
SLOW = {"upload": "50Mbit/s", "download": "50Mbit/s", "latency": "100ms"}
CPU = {"kind": "cpu", "count": 2, "peak_flops": 1e9}


def estimated(spec: RunSpec) -> RunEstimate:
    return estimate_run(spec, model_config(spec))


def shown(estimate: RunEstimate, width: int = 80) -> str:
    out = StringIO()
    show_estimate(estimate, Console(file=out, width=width, highlight=False))
    return out.getvalue()


@pytest.fixture(scope="module")
def fleet():
    """A shipped spec with twelve volunteers that have a price."""
    return estimate_run(*shipped(*FLEET))


def test_the_shipped_spec_has_every_figure_as_json(fleet):
    assert fleet.unknown == ()
    assert fleet.timeline is not None and fleet.run_s is not None and fleet.cost is not None
    assert fleet.cost.per_hour == 12 * 4 * 2.0
    assert fleet.cost.run == pytest.approx(96.0 * fleet.run_s / 3600)
    assert fleet.run_s == pytest.approx(300 * fleet.timeline.step_s, rel=0.1)
    data = json.loads(json.dumps(fleet.to_json(), allow_nan=False))
    keys = (
        "parameters learner samplers version_bytes follower_bytes joiner_bytes arrivals validators "
        "validator_tokens_per_s timeline steps fill_deadline_s run_s cost assumed unknown "
        "supervised islands stalled max_hours audit_bytes"
    )
    assert set(data) == set(keys.split())
    figures = {"devices", "device_memory", "memory", "flops", "step_s", "shared_prompts"}
    assert set(data["learner"]) == figures
    assert data["learner"]["memory"]["total"] > data["learner"]["memory"]["masters"] > 0
    assert {"kv_tokens", "full_sequences"} <= set(data["samplers"][0]["memory"])
    keys = "step_s idle first_rollouts_s full_s start_s lag filled_share intervals bottleneck"
    assert set(data["timeline"]) == set(keys.split())
    assert set(data["timeline"]["idle"]) == {"learner", "broadcast", "volunteers", "validators"}
    assert set(data["assumed"][0]) == {"name", "value", "unit", "source"}


def test_people_read_sizes_times_idle_shares_and_prices(fleet):
    text = shown(fleet, width=120)
    for part in (
        "32.8 G parameters, a version is 65.5 GB", "of 95 GB", "relay-eu > volunteers (12)",
        "866 k", "26.4",  # tokens of KV in a replica; sequences of full length at once
        "19 min 3 s",  # 84.3 GB at 590 Mbit/s, for who joins
        "limited by", "batch full after", "96.00 an hour", "0.25 of data.max_prompt_tokens",
    ):  # fmt: skip
        assert part in text, part
    for role in ("learner", "broadcast", "volunteers", "validators"):
        assert any(role in line and "idle" in line for line in text.splitlines()), role


def test_what_nobody_knows_is_named_by_field_and_the_rest_is_shown():
    estimate = estimate_run(*shipped(*UNKNOWN, profile="laptop"))
    assert estimate.unknown == tuple(change.partition("=")[0] for change in UNKNOWN)
    assert estimate.timeline is None and estimate.learner.memory is not None
    text = shown(estimate)
    assert "its time is not known" in text
    assert all(f"  {field}" in text for field in estimate.unknown)
    # and without the model's shape, what the estimate rests on
    text = shown(estimate_run(shipped()[0], None))
    assert "model.hf, as a directory with a config.json" in text and "mean new tokens" in text


def test_every_input_says_where_it_is_from():
    changes = (
        "estimate.mean_new_tokens=5000",
        "samplers.volunteers.hardware.memory_bandwidth=2e12",
        "algorithm.filters.zero_variance=false",
        "learner.hardware.peak_flops=1e12",
    )
    entries = estimate_run(*shipped(*changes, FLEET[0])).assumed
    found = {entry.name: (entry.value, entry.source) for entry in entries}
    assert found["mean new tokens"] == (5000.0, "estimate.mean_new_tokens")
    assert found["mean prompt tokens"] == (512.0, "0.25 of data.max_prompt_tokens")
    assert found["h100-80g bandwidth"] == (2e12, "samplers.volunteers.hardware.memory_bandwidth")
    assert found["h100-80g peak"] == (989e12, "table of h100-80g")
    assert found["tpu-v5p peak"] == (1e12, "learner.hardware.peak_flops")
    assert found["filtered share"] == (0.0, "algorithm.filters: none is on")
    assert found["link"] == (590e6, "samplers.volunteers.download")
    assert found["a validator"][1] == "verify.hardware"
    entries = estimate_run(*shipped("verify.hardware=null", *UNKNOWN[:1])).assumed
    sources = {entry.name: entry.source for entry in entries}
    assert sources["a validator"] == "no verify.hardware: as a replica of volunteers"


def test_lengths_have_the_mean_and_spread_asked_for():
    lengths, filtered = draws(
        seed=3, group_size=16, mean=6000.0, spread=0.6, longest=1e9, filtered_share=0.25
    )
    groups = [(step, group) for step in range(20) for group in range(100)]
    drawn = [length for step, group in groups for length in lengths(step, group)]
    assert fmean(drawn) == pytest.approx(6000.0, rel=0.02)
    assert stdev(drawn) / fmean(drawn) == pytest.approx(0.6, rel=0.05)
    assert fmean(filtered(step, group) for step, group in groups) == pytest.approx(0.25, abs=0.03)


def test_a_step_on_documents_is_its_updates_and_a_share_of_the_held_out_tokens():
    # given 25 steps of 2 updates of 1,024 tokens, rows of 64 tokens, 4,096 held out every 5 steps
    spec = supervised_spec()
    config, estimate = model_config(spec), estimated(spec)
    assert config is not None
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
    assert run.run_flops == pytest.approx(25 * flops.total)
    # and before them are the corpus and the parameters, in float32
    assert run.corpus_s == 51_200 / 0.45e6 and run.corpus_bytes == 51_200 * (2 + 56 / 64)
    assert run.drawn_bytes == 4 * estimate.parameters
    # and there are versions 0, 10, 20 and 25, and nobody who fetches them
    assert run.versions == 4
    assert (estimate.samplers, estimate.validators, estimate.timeline) == ((), 0, None)
    json.dumps(estimate.to_json(), allow_nan=False)
    with pytest.raises(UserError, match="a run of kind pretrain has no workers to simulate"):
        simulate(spec, config)


def test_the_learner_on_documents_holds_no_version_and_the_batch_of_one_update():
    memory, larger, adapters = (
        estimated(supervised_spec(**blocks)).learner.memory
        for blocks in ({}, {"algorithm": {"tokens_per_update": 4096}}, {"learner": {"lora": {}}})
    )
    assert memory is not None and larger is not None and adapters is not None
    assert (memory.published, memory.reference) == (0.0, 0.0)
    assert adapters.reference > 0.0
    # tokens, segments, positions, targets and weights of the 3,072 more, 4 bytes each, on 2 devices
    assert larger.total - memory.total == 5 * 4 * 3072 / 2


def of_islands(**islands: object) -> tuple[RunEstimate, IslandsEstimate]:
    estimate = estimated(spec_with(**islands))
    assert estimate.islands is not None
    return estimate, estimate.islands


def spec_with(**islands: object) -> RunSpec:
    return supervised_spec(learner={"hardware": CPU, "islands": islands})


def elements() -> int:
    config = model_config(supervised_spec())
    assert config is not None
    return sum(prod(shape) for _, shape in hf_shapes(config))


def test_links_and_latency_are_waited_for_between_steps():
    assert estimated(supervised_spec()).islands is None  # one learner exchanges nothing
    # given four islands behind 50 Mbit/s and 100 ms
    estimate, islands = of_islands(members=[{"name": name, **SLOW} for name in "abcd"])
    # then each sends one share to three others, and fetches three
    n = elements()
    share = 2 * n + 4 * -(-n // 1024)
    assert (islands.codec, islands.share_bytes, islands.whole_bytes) == ("float16", share, 4 * n)
    assert {(each.up_bytes, each.down_bytes) for each in islands.islands} == {(3 * share,) * 2}
    # and waits for that, the round trips, and its host
    transfer = 3 * share / (50e6 / 8) + ROUND_TRIPS * 0.1
    host = (6 + 2 * 4) * 4 * n / SHARE_BYTES_S + REPORT_TRIPS * 0.1
    assert islands.host_s == pytest.approx(host)
    assert islands.islands[0].transfer_s == pytest.approx(transfer)
    assert islands.exposed_s == pytest.approx(transfer + host)
    # and holds six vectors and all shares
    assert islands.host_bytes == 6 * 4 * n + 4 * share
    # and a step is a quarter of the updates' work on each, and the wait
    alone = estimated(supervised_spec(learner={"hardware": CPU})).learner.flops
    assert alone is not None
    computed = (alone.useful / 4 + alone.forward) / (0.4 * 2e9)
    assert [each.compute_s for each in islands.islands] == [pytest.approx(computed)] * 4
    assert estimate.learner.step_s == pytest.approx(computed + transfer + host)
    assert islands.islands[0].utilization == pytest.approx(computed / (computed + transfer + host))
    json.dumps(estimate.to_json(), allow_nan=False)
    text = shown(estimate, width=120)
    for part in (
        "as float16, 2 times smaller", "a (4 alike)", "2 x cpu", "between two steps",
        "2.05 k tokens a step", "25 steps", "51.2 k", "of the FLOPs measure held-out loss",
        "a version every 10 steps, 4 in all", "learner.packing.tokens: documents fill rows",
    ):  # fmt: skip
        assert part in text, part
    assert [part for part in ("Samplers", "Broadcast", "prompt", "idle") if part in text] == []


def test_overlap_hides_what_fits_beside_the_updates():
    # given an exchange that takes longer than a step's updates, and one that does not
    (_, exposed), (_, hidden) = (
        of_islands(members=[{"name": name, **link} for name in "ab"], overlap=1)
        for link in (SLOW, {})
    )
    # then what is left over of the first is waited for, and of both what is done between updates
    compute_s = exposed.islands[0].compute_s
    assert compute_s is not None
    busy = exposed.host_s + exposed.islands[0].transfer_s
    assert busy > compute_s and exposed.exposed_s == pytest.approx(busy - compute_s)
    assert hidden.exposed_s == pytest.approx(6 * 4 * elements() / SHARE_BYTES_S)


@pytest.mark.parametrize("count", [1, 8])
def test_the_slowest_link_and_the_slowest_island_decide(count):
    # given islands of which one has a slow uplink and another half of the devices
    members: list[dict[str, object]] = [{"name": str(i)} for i in range(count)]
    members += [{"name": "far", "upload": "8Mbit/s"}]
    members += [{"name": "small", "hardware": {**CPU, "count": 1}, "mesh": {"fsdp": 1}}]
    _, islands = of_islands(members=members)
    by_name = {each.name: each for each in islands.islands}
    # then everybody else waits for the slow uplink, which serves all of them
    assert by_name["far"].transfer_s == 0.0
    fetched = (count + 1) * islands.share_bytes
    assert by_name["0"].transfer_s == pytest.approx(fetched / 1e6)
    # and nobody is as busy as the one that has the fewest devices
    assert max(islands.islands, key=lambda each: each.utilization or 0.0).name == "small"


def test_a_smaller_codec_sends_fewer_bytes():
    n = elements()
    for kind, size in (
        ("float32", 4 * n),
        ("float16", 2 * n + 4 * -(-n // 1024)),
        ("sparse", 132 * -(-n // 4096)),
    ):
        _, islands = of_islands(count=2, codec={"kind": kind})
        assert islands.share_bytes == pytest.approx(size, rel=0.01), kind


def test_every_islands_hardware_is_paid_and_an_unknown_peak_named():
    paid = {**CPU, "price_per_hour": 3.0}
    rented = {"name": "b", "hardware": {**CPU, "count": 4, "price_per_hour": 5.0}}
    islands = {"members": [{"name": "a"}, rented, {"name": "c"}]}
    spec = supervised_spec(learner={"hardware": paid, "islands": islands})
    assert cost(spec, None).by_role == {"learner": 6.0, "island-b": 20.0, "island-c": 6.0}
    members = [{"name": "a"}, {"name": "b", "hardware": {"kind": "mine"}}]
    estimate, found = of_islands(members=members)
    assert estimate.unknown == ("learner.islands.members.b.hardware.peak_flops",)
    assert (estimate.learner.step_s, found.exposed_s) == (None, None)
    assert found.islands[0].compute_s is not None
