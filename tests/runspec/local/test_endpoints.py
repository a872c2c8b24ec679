"""Ports: chosen, kept, fixed by the spec, taken by someone else."""

from __future__ import annotations

import os
import random
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from runspec.core.errors import UserError
from runspec.local.endpoints import (
    Endpoints,
    address,
    fixed_metrics,
    load_endpoints,
    plan_endpoints,
    port_is_free,
    save_endpoints,
)
from tests.runspec.local.fake_run import small_spec


@pytest.fixture
def taken() -> Iterator[int]:
    """A port that this process listens on."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def plan(*overrides: str, previous: Endpoints | None = None, is_free=port_is_free) -> Endpoints:
    spec = small_spec("small", 5, *overrides)
    return plan_endpoints(spec, previous, is_free, random.Random(0))


def test_chosen_ports_are_free_distinct_and_survive_the_file(tmp_path: Path) -> None:
    endpoints = plan()
    ports = [address(url)[1] for url in endpoints.all().values()]
    assert len(set(ports)) == 3
    assert all(port_is_free("127.0.0.1", port) for port in ports)

    assert load_endpoints(tmp_path) is None
    save_endpoints(tmp_path, endpoints)
    assert load_endpoints(tmp_path) == endpoints


def test_a_run_keeps_its_ports_and_moves_only_what_is_taken() -> None:
    before = plan()
    assert plan(previous=before) == before
    origin = address(before.origin)[1]
    after = plan(previous=before, is_free=lambda host, port: port != origin)
    assert after.origin != before.origin
    assert (after.coordinator, after.relays) == (before.coordinator, before.relays)


def test_the_origin_listens_where_the_spec_says() -> None:
    at = plan("broadcast.origin.url=http://127.0.0.1:9100", is_free=lambda host, port: True)
    assert at.origin == "http://127.0.0.1:9100"
    with pytest.raises(UserError, match="port 9100 is taken"):
        plan(
            "broadcast.origin.url=http://127.0.0.1:9100",
            is_free=lambda host, port: port != 9100,
        )


def test_a_relay_of_another_machine_is_known_by_its_url_and_no_port_is_taken(
    tmp_path: Path,
) -> None:
    # given a relay that placement leaves to others, behind HTTPS
    relays = "broadcast.relays={local: {url: https://relay.example.org/}}"
    endpoints = plan(relays, "placement.roles=[validators, volunteers]")
    # then it is no endpoint of this machine, and the file keeps it
    assert endpoints.elsewhere == {"local": "https://relay.example.org"}
    assert set(endpoints.all()) == {"coordinator", "origin"}
    save_endpoints(tmp_path, endpoints)
    assert load_endpoints(tmp_path) == endpoints


def test_a_taken_port_is_named_with_its_process(taken: int) -> None:
    with pytest.raises(UserError) as error:
        plan(f"placement.base_port={taken}")
    assert f"port {taken} is taken by " in str(error.value)
    assert f"(process {os.getpid()})" in str(error.value)
    assert error.value.place == f"coordinator at 127.0.0.1:{taken}"


MEASURED = ["publisher", "learner", "validator-0", "evaluator", "volunteers-0"]


def test_figures_have_free_ports_of_their_own_that_are_kept(tmp_path: Path) -> None:
    # given a run that asks for them
    before = plan("placement.metrics={}")
    assert list(before.metrics) == MEASURED
    urls = [*before.all().values(), *before.metrics.values()]
    assert len(set(urls)) == len(urls) == 8
    save_endpoints(tmp_path, before)
    assert load_endpoints(tmp_path) == before
    # then it keeps them, and moves only what is taken
    assert plan("placement.metrics={}", previous=before) == before
    learner = address(before.metrics["learner"])[1]
    after = plan(
        "placement.metrics={}", previous=before, is_free=lambda host, port: port != learner
    )
    assert after.metrics.pop("learner") != before.metrics["learner"]
    assert after.metrics.items() < before.metrics.items()
    # and another host gets new ones
    moved = plan("placement.metrics.host=127.0.0.2", previous=before)
    assert {address(url)[0] for url in moved.metrics.values()} == {"127.0.0.2"}


def test_a_fixed_port_of_figures_that_is_taken_stops_no_run(taken: int) -> None:
    found = plan(f"placement.metrics.base_port={taken}")
    assert found.metrics["publisher"] == f"http://127.0.0.1:{taken}"
    assert plan().metrics == {}


def test_on_kubernetes_all_but_the_trunks_have_one_port() -> None:
    cluster = "placement={backend: kubernetes, kubernetes: {image: i}}"
    spec = small_spec("small", 5, "placement.metrics={base_port: 9100}", cluster)
    ports = {name: address(url)[1] for name, url in fixed_metrics(spec).items()}
    assert ports == dict(zip(MEASURED, [9100, 9101, 9100, 9100, 9100], strict=True))
