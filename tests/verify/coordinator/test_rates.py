"""Token buckets: no more than the rate, no less either, in bounded memory."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verify.coordinator.rates import (
    MAX_NEWCOMER_POLLS,
    MAX_NEWCOMER_POLLS_PER_PLACE,
    MAX_POLLS,
    PER_PLACE,
    TOGETHER,
    WORKER_RATES,
    Buckets,
    Rate,
    RateLimits,
)

gaps = st.lists(st.floats(0.0, 3.0), min_size=1, max_size=80)


@given(gaps, st.floats(0.2, 5.0), st.integers(1, 6))
def test_no_window_sees_more_than_the_burst_and_its_rate(gaps, per_s, burst):
    buckets, now, taken = Buckets(), 0.0, []
    for gap in gaps:
        now += gap
        if buckets.take("k", Rate(per_s, burst), now) == 0.0:
            taken.append(now)
    for first in range(len(taken)):
        for last in range(first, len(taken)):
            window = taken[last] - taken[first]
            assert last - first + 1 <= burst + per_s * window + 1e-6


@given(gaps, st.floats(0.2, 5.0), st.integers(1, 6))
def test_who_comes_again_when_told_is_served_and_who_never_asks_too_often_always(gaps, per_s, b):
    rate, buckets, now = Rate(per_s, b), Buckets(), 0.0
    for gap in gaps:
        now += gap
        wait = buckets.take("k", rate, now)
        assert wait >= 0.0
        if wait > 0.0:
            now += wait + 1e-6
            assert buckets.take("k", rate, now) == 0.0
    calm = Buckets()
    assert all(calm.take("k", rate, n * (1.0 + 1e-6) / per_s) == 0.0 for n in range(20))


@given(st.lists(st.tuples(st.integers(0, 30), st.floats(0.0, 2.0)), max_size=120))
def test_the_memory_is_bounded_and_a_full_bucket_is_forgotten_without_harm(requests):
    bounded, free, now = Buckets(max_buckets=5), Buckets(), 0.0
    for name, gap in requests:
        now += gap
        refused = bounded.take(str(name), Rate(1.0, 2), now) > 0.0
        assert len(bounded) <= 5
        if not refused:  # what is remembered is never kinder than an unbounded memory
            assert free.take(str(name), Rate(1.0, 2), now) == 0.0


@given(gaps, st.floats(0.2, 5.0), st.integers(1, 6))
def test_looking_takes_nothing_and_says_what_taking_would(gaps, per_s, burst):
    rate, buckets, now = Rate(per_s, burst), Buckets(), 0.0
    for gap in gaps:
        now += gap
        seen = buckets.wait_s("k", rate, now)
        assert seen == buckets.wait_s("k", rate, now) == buckets.take("k", rate, now)


def test_each_registered_key_has_buckets_of_its_own_for_each_kind():
    limits = RateLimits()
    burst = WORKER_RATES["heartbeat"].burst
    assert [limits.of_worker("a", "heartbeat", 0.0) for _ in range(burst)] == burst * [0.0]
    assert limits.of_worker("a", "heartbeat", 0.0) == pytest.approx(1.0)
    assert limits.of_worker("b", "heartbeat", 0.0) == limits.of_worker("a", "lease", 0.0) == 0.0


@pytest.mark.parametrize("kind", sorted(TOGETHER))
def test_a_flood_from_one_place_leaves_the_others_their_own(kind):
    limits, burst = RateLimits(), PER_PLACE[kind].burst
    assert all(limits.of_stranger("flood", kind, 0.0) == 0.0 for _ in range(burst))
    assert all(limits.of_stranger("flood", kind, 0.0) > 0.0 for _ in range(10 * burst))

    assert limits.of_stranger("another", kind, 0.0) == 0.0
    assert limits.of_worker("a", "lease", 0.0) == 0.0


@pytest.mark.parametrize("kind", sorted(TOGETHER))
def test_floods_from_many_places_meet_a_bound_of_all_and_workers_do_not(kind):
    limits, all_together = RateLimits(), TOGETHER[kind].burst
    admitted = sum(limits.of_stranger(f"p{n}", kind, 0.0) == 0.0 for n in range(all_together + 50))
    assert admitted == all_together
    assert limits.of_stranger("another", kind, 0.0) > 0.0
    assert limits.of_worker("a", "lease", 0.0) == 0.0


def test_signatures_in_vain_are_counted_by_place_and_nobody_elses():
    limits = RateLimits()
    for _ in range(PER_PLACE["unbelieved"].burst):
        assert limits.of_unbelieved("flood", 0.0) == 0.0
        limits.unbelieved("flood", 0.0)
    assert limits.of_unbelieved("flood", 0.0) == pytest.approx(0.05)
    assert limits.of_unbelieved("another", 0.0) == 0.0
    assert limits.of_unbelieved("flood", 0.06) == 0.0


def test_only_so_many_requests_of_a_key_are_kept_waiting():
    limits = RateLimits()
    held = [limits.poll("a") for _ in range(MAX_POLLS + 1)]
    assert [each.__enter__() for each in held] == [True] * MAX_POLLS + [False]
    with limits.poll("b") as allowed:
        assert allowed
    for each in held:
        each.__exit__(None, None, None)
    with limits.poll("a") as allowed:
        assert allowed


@pytest.mark.parametrize("invited", [True, False])
def test_of_newcomers_that_wait_a_place_has_a_part(invited):
    limits = RateLimits()
    with ExitStack() as held:
        mine = [limits.newcomer_poll("flood", invited=invited) for _ in range(MAX_NEWCOMER_POLLS)]
        allowed = [held.enter_context(each) for each in mine]
        assert sum(allowed) == MAX_NEWCOMER_POLLS_PER_PLACE
    with limits.newcomer_poll("flood", invited=invited) as allowed_again:
        assert allowed_again


def test_strangers_that_wait_take_no_place_of_the_invited():
    limits = RateLimits()
    with ExitStack() as held:
        for number in range(MAX_NEWCOMER_POLLS + 1):
            allowed = held.enter_context(limits.newcomer_poll(f"p{number}", invited=False))
            assert allowed == (number < MAX_NEWCOMER_POLLS)
        assert held.enter_context(limits.newcomer_poll("p0", invited=True))
