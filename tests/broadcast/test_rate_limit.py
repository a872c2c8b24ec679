"""The token bucket: what a client may have over any time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broadcast.rate_limit import RateLimit


def test_a_client_has_a_second_at_once_and_the_rate_from_then_on() -> None:
    limit = RateLimit(100)

    assert limit.take("a", 100, now=50.0) == 0.0
    assert limit.take("a", 1, now=50.0) == 0.0  # not in debt yet
    assert limit.take("a", 1, now=50.0) == pytest.approx(0.01)
    assert limit.take("a", 1, now=50.02) == 0.0


def test_a_piece_larger_than_the_bucket_can_be_had_and_is_paid_for_after() -> None:
    limit = RateLimit(100)

    assert limit.take("a", 1000, now=0.0) == 0.0

    assert limit.take("a", 1, now=0.0) == pytest.approx(9.0)
    assert limit.take("a", 1, now=8.0) == pytest.approx(1.0)
    assert limit.take("a", 1, now=9.0) == 0.0


def test_clients_do_not_pay_for_each_other() -> None:
    limit = RateLimit(100)
    limit.take("a", 10_000, now=0.0)

    assert limit.take("b", 100, now=0.0) == 0.0
    assert limit.take("a", 1, now=0.0) > 0


def test_what_is_refused_costs_nothing() -> None:
    limit = RateLimit(100)
    limit.take("a", 300, now=0.0)
    waits = [limit.take("a", 10**9, now=1.0) for _ in range(3)]

    assert waits == pytest.approx([1.0, 1.0, 1.0])


def test_rest_is_not_saved_up_beyond_a_second() -> None:
    limit = RateLimit(100)
    limit.take("a", 1, now=0.0)

    assert limit.take("a", 150, now=10**6) == 0.0
    assert limit.take("a", 1, now=10**6) == pytest.approx(0.5)


def test_only_so_many_clients_are_remembered() -> None:
    limit = RateLimit(100, max_clients=3)
    for client in ("a", "b", "c"):
        limit.take(client, 1000, now=0.0)
    limit.take("a", 1, now=9.0)

    limit.take("d", 1000, now=9.0)

    assert limit.clients == 3
    assert limit.take("b", 1, now=9.0) == 0.0  # forgotten: it took something longest ago
    assert limit.take("d", 1, now=9.0) > 0


@given(
    rate=st.integers(1, 10**9),
    asked=st.lists(st.tuples(st.floats(0, 100), st.integers(0, 10**8)), max_size=50),
)
def test_never_more_than_the_rate_a_second_and_one_piece(
    rate: int, asked: list[tuple[float, int]]
) -> None:
    # given requests at any times, of any sizes
    limit, now, taken, largest = RateLimit(rate), 0.0, 0, 0
    for pause, size in asked:
        now += pause
        wait_s = limit.take("a", size, now)
        if wait_s == 0:
            taken += size
            largest = max(largest, size)
        else:
            # when one is refused, then waiting for as long as it said is enough
            now += wait_s * (1 + 1e-9) + 1e-9
            assert limit.take("a", 0, now) == 0.0
    # then the whole is bounded
    assert taken <= (now + 1) * rate * (1 + 1e-6) + largest
