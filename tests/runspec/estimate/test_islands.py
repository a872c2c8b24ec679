"""The estimate of islands: bytes of shares, what of their exchange is waited for, and the price."""

from __future__ import annotations

import json
from io import StringIO
from math import prod

import pytest
from rich.console import Console

from bridge.weight_map import hf_shapes
from runspec.cli.estimate_view import show_estimate
from runspec.core.models.spec_model import model_config
from runspec.core.spec.schema import RunSpec
from runspec.estimate.assumed import REPORT_TRIPS, ROUND_TRIPS, SHARE_BYTES_S
from runspec.estimate.islands import IslandEstimate, IslandsEstimate
from runspec.estimate.price import hourly_prices
from runspec.estimate.run import RunEstimate, estimate_run
from tests.runspec.supervised import supervised_spec

SLOW = {"upload": "50Mbit/s", "download": "50Mbit/s", "latency": "100ms"}
CPU = {"kind": "cpu", "count": 2, "peak_flops": 1e9}


def spec_with(**islands: object) -> RunSpec:
    return supervised_spec(learner={"hardware": CPU, "islands": islands})


def estimated(spec: RunSpec) -> tuple[RunEstimate, IslandsEstimate]:
    estimate = estimate_run(spec, model_config(spec))
    assert estimate.islands is not None
    return estimate, estimate.islands


def elements(spec: RunSpec) -> int:
    config = model_config(spec)
    assert config is not None
    return sum(prod(shape) for _, shape in hf_shapes(config))


def test_one_learner_exchanges_nothing() -> None:
    spec = supervised_spec()
    assert estimate_run(spec, model_config(spec)).islands is None


def test_links_and_latency_are_waited_for_between_steps() -> None:
    # given four islands behind 50 Mbit/s and 100 ms
    spec = spec_with(members=[{"name": name, **SLOW} for name in "abcd"])
    # when the run is estimated
    estimate, islands = estimated(spec)
    # then each sends one share to three others, and fetches three
    n = elements(spec)
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
    alone = estimate_run(supervised_spec(learner={"hardware": CPU}), model_config(spec)).learner
    assert alone.flops is not None
    computed = (alone.flops.useful / 4 + alone.flops.forward) / (0.4 * 2e9)
    assert islands.islands[0].compute_s == pytest.approx(computed)
    assert estimate.learner.step_s == pytest.approx(computed + transfer + host)
    assert islands.islands[0].utilization == pytest.approx(computed / (computed + transfer + host))
    json.dumps(estimate.to_json(), allow_nan=False)


def test_overlap_hides_what_fits_beside_the_updates() -> None:
    # given an exchange that takes longer than a step's updates, and one that does not
    slow = [{"name": name, **SLOW} for name in "ab"]
    fast = [{"name": name} for name in "ab"]
    [_, exposed], [_, hidden] = (
        estimated(spec_with(members=members, overlap=1)) for members in (slow, fast)
    )
    # then what is left over of the first is waited for, and of both what is done between updates
    compute_s = exposed.islands[0].compute_s
    assert compute_s is not None
    busy = exposed.host_s + exposed.islands[0].transfer_s
    assert busy > compute_s and exposed.exposed_s == pytest.approx(busy - compute_s)
    assert hidden.exposed_s == pytest.approx(6 * 4 * elements(spec_with(count=2)) / SHARE_BYTES_S)


@pytest.mark.parametrize("count", [1, 8])
def test_the_slowest_link_and_the_slowest_island_decide(count: int) -> None:
    # given islands of which one has a slow uplink and another a quarter of the devices
    members: list[dict[str, object]] = [{"name": str(i)} for i in range(count)]
    members += [{"name": "far", "upload": "8Mbit/s"}]
    members += [{"name": "small", "hardware": {**CPU, "count": 1}, "mesh": {"fsdp": 1}}]
    _, islands = estimated(spec_with(members=members))
    by_name = {each.name: each for each in islands.islands}
    # then everybody else waits for the slow uplink, which serves all of them
    assert by_name["far"].transfer_s == 0.0
    fetched = (count + 1) * islands.share_bytes
    assert by_name["0"].transfer_s == pytest.approx(fetched / 1e6)
    # and nobody is as busy as the one that has the fewest devices
    assert max(islands.islands, key=lambda each: each.utilization or 0.0).name == "small"


@pytest.mark.parametrize("kind", ["float32", "int8", "int4", "sparse"])
def test_a_smaller_codec_sends_fewer_bytes(kind: str) -> None:
    spec = spec_with(count=2, codec={"kind": kind})
    _, islands = estimated(spec)
    n = elements(spec)
    expected = {
        "float32": 4 * n,
        "int8": n + 4 * -(-n // 256),
        "int4": 64 * -(-n // 128) + 4 * -(-n // 128),
        "sparse": 132 * -(-n // 4096),
    }
    assert islands.share_bytes == pytest.approx(expected[kind], rel=0.01)


def test_every_islands_hardware_is_paid() -> None:
    paid = {**CPU, "price_per_hour": 3.0}
    rented = {"name": "b", "hardware": {**CPU, "count": 4, "price_per_hour": 5.0}}
    islands = {"members": [{"name": "a"}, rented, {"name": "c"}]}
    spec = supervised_spec(learner={"hardware": paid, "islands": islands})
    assert hourly_prices(spec) == {"learner": 6.0, "island-b": 20.0, "island-c": 6.0}


def test_an_unknown_peak_is_named_and_the_rest_is_shown() -> None:
    spec = spec_with(members=[{"name": "a"}, {"name": "b", "hardware": {"kind": "mine"}}])
    estimate, islands = estimated(spec)
    assert estimate.unknown == ("learner.islands.members.b.hardware.peak_flops",)
    assert (estimate.learner.step_s, islands.exposed_s) == (None, None)
    assert islands.islands[0].compute_s is not None


def test_people_read_bytes_times_and_shares() -> None:
    out = StringIO()
    spec = spec_with(members=[{"name": name, **SLOW} for name in "abcd"])
    show_estimate(estimated(spec)[0], Console(file=out, width=80, highlight=False))
    text = out.getvalue()
    for part in ("as float16, 2 times smaller", "a (4 alike)", "2 x cpu", "between two steps"):
        assert part in text


def test_islands_are_equal_where_the_spec_says_nothing_else() -> None:
    _, islands = estimated(spec_with(count=3))
    first: IslandEstimate = islands.islands[0]
    assert [each.name for each in islands.islands] == ["0", "1", "2"]
    assert {each.compute_s for each in islands.islands} == {first.compute_s}
