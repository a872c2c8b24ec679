from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runspec.core.spec.schema import Broadcast, Origin, Relay, RunSpec
from runspec.estimate.broadcast import arrivals, broadcast_times
from tests.runspec.estimate.shipped import shipped

SIZE = 64e6
"""Bytes of a version here."""
CHUNK = 1e6
BASE, _ = shipped()


def links(
    *relays: Relay,
    origin: float | None = None,
    download: float | None = None,
    replicas: int = 1,
    chunk: float = CHUNK,
) -> RunSpec:
    """A spec with these links, in bytes/s where the schema has bits/s."""
    broadcast = Broadcast(
        origin=Origin.model_construct(upload=bits(origin)),
        relays=list(relays),
        chunk_bytes=int(chunk),
    )
    pool = BASE.samplers[0].model_copy(
        update={"download": bits(download), "replicas": replicas, "name": "pool"}
    )
    return BASE.model_copy(update={"broadcast": broadcast, "samplers": [pool]})


def relay(
    name: str, *upstream: str, download: float | None = None, upload: float | None = None
) -> Relay:
    return Relay.model_construct(
        name=name,
        url=None,
        upstream=list(upstream or ["origin"]),
        download=bits(download),
        upload=bits(upload),
    )


def bits(rate: float | None) -> float | None:
    return None if rate is None else 8 * rate


def test_the_published_broadcast_of_intellect_2() -> None:
    spec = links(download=590e6 / 8)

    # 62 GB at 590 Mb/s: 14 minutes.
    assert broadcast_times(spec, 62e9)["pool-0"] / 60 == pytest.approx(14.0, rel=0.01)


def test_a_chain_is_as_slow_as_its_slowest_link_and_a_chunk_for_each_hop() -> None:
    eu = relay("eu", download=2e6)
    spec = links(eu, relay("far", "eu", download=1e6), download=4e6, replicas=1)

    found = {arrival.name: arrival for arrival in arrivals(spec, SIZE)}

    assert found["relay-eu"].seconds == 32.0
    assert found["relay-far"].seconds == 64.0 + 0.5
    assert found["relay-far"].path == ("origin", "relay-eu", "relay-far")
    assert found["relay-far"].limit == "broadcast.relays.far.download"


def test_workers_take_relays_in_turn_or_the_one_that_their_pool_prefers() -> None:
    relays = [relay("a", upload=1e6), relay("b", upload=1e6)]
    in_turn = links(*relays, replicas=4)
    pool = in_turn.samplers[0].model_copy(update={"relays": ["b", "a"]})
    preferring = in_turn.model_copy(update={"samplers": [pool]})

    assert set(broadcast_times(in_turn, SIZE).values()) == {128.0}
    assert set(broadcast_times(preferring, SIZE).values()) == {256.0}


RATES = st.floats(1e5, 1e9)


@settings(deadline=None)
@given(RATES, st.lists(RATES, min_size=1, max_size=6))
def test_children_get_no_more_than_the_upload_and_leave_none_that_one_could_take(
    upload: float, downloads: list[float]
) -> None:
    relays = [relay(f"r{i}", download=rate) for i, rate in enumerate(downloads)]

    rates = {a.name: a.rate for a in arrivals(links(*relays, origin=upload, replicas=0), SIZE)}

    total = sum(rates.values())
    assert total <= upload * (1 + 1e-9)
    assert total == pytest.approx(min(upload, sum(downloads)))
    assert all(rates[f"relay-r{i}"] <= r * (1 + 1e-9) for i, r in enumerate(downloads))
