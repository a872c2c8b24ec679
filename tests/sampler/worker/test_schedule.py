"""What a worker does next, case by case and whatever happens."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from sampler.worker.schedule import (
    MAX_SAMPLING,
    Ask,
    Load,
    OpenLease,
    Situation,
    Submit,
    Wait,
    next_action,
)
from verify.formats.lease import MAX_OPEN_LEASES

IDLE = Situation(
    leases=(), loaded=3, running=0, capacity=100, asking=False, in_flight=False, newest=3
)


def situation(*leases: tuple[int, str], **changes: object) -> Situation:
    held = [OpenLease(f"lease-{i}", version, stage) for i, (version, stage) in enumerate(leases)]
    return replace(IDLE, leases=held, **changes)


def test_an_idle_worker_asks_for_a_lease_and_only_once_at_a_time():
    assert next_action(situation()) == Ask()
    assert next_action(situation(asking=True)) == Wait()


def test_the_next_lease_is_asked_for_while_the_last_one_samples():
    assert next_action(situation((3, "sampling"), running=90)) == Wait()
    assert next_action(situation((3, "sampling"), running=40)) == Ask()


def test_a_lease_of_the_loaded_version_goes_into_the_engine_at_once():
    assert next_action(situation((3, "sampling"), (3, "waiting"), running=40)) == Submit("lease-1")


def test_an_untrusted_pool_drains_and_then_loads():
    assert next_action(situation((3, "sampling"), (4, "waiting"), running=1)) == Wait()
    assert next_action(situation((3, "finishing"), (4, "waiting"))) == Load(4)
    assert next_action(situation((4, "waiting"), loaded=4)) == Submit("lease-0")


def test_a_worker_that_was_restarted_goes_back_to_the_version_of_its_lease():
    assert next_action(situation((2, "waiting"), loaded=3)) == Load(2)


def test_a_pool_with_in_flight_updates_loads_in_the_middle_of_rollouts():
    now = situation((3, "sampling"), running=90, in_flight=True, newest=4)

    assert next_action(now) == Load(4)
    assert next_action(replace(now, loaded=4)) == Wait()
    older = situation((3, "sampling"), (3, "waiting"), loaded=4, in_flight=True, newest=4)
    assert next_action(older) == Submit("lease-1")


def test_an_untrusted_pool_never_loads_what_no_lease_names():
    assert next_action(situation((3, "sampling"), running=90, newest=4)) == Wait()


def test_a_submission_on_its_way_does_not_keep_the_engine_from_being_filled():
    assert next_action(situation((3, "finishing"), (3, "sampling"), running=10)) == Ask()
    full = situation((3, "finishing"), (3, "sampling"), (3, "sampling"), running=10)
    assert next_action(full) == Wait()


STAGES = st.sampled_from(["waiting", "sampling", "finishing"])
SITUATIONS = st.builds(
    Situation,
    leases=st.lists(
        st.builds(OpenLease, digest=st.uuids().map(str), version=st.integers(0, 4), stage=STAGES),
        max_size=4,
    ),
    loaded=st.none() | st.integers(0, 4),
    running=st.integers(0, 200),
    capacity=st.integers(1, 200),
    asking=st.booleans(),
    in_flight=st.booleans(),
    newest=st.integers(-1, 5),
)


@given(SITUATIONS)
def test_a_rollout_of_an_untrusted_pool_is_of_one_version(now: Situation):
    match next_action(now):
        case Load():
            assert now.in_flight or now.running == 0
        case Submit(digest):
            (lease,) = [lease for lease in now.leases if lease.digest == digest]
            assert lease.stage == "waiting"
            assert lease.version == now.loaded or now.in_flight


@given(SITUATIONS)
def test_a_worker_never_asks_for_more_than_it_may_hold_or_can_sample(now: Situation):
    if next_action(now) == Ask():
        assert not now.asking
        assert len(now.leases) < MAX_OPEN_LEASES
        assert sum(lease.stage == "sampling" for lease in now.leases) < MAX_SAMPLING
        assert not any(lease.stage == "waiting" for lease in now.leases)


@given(SITUATIONS)
def test_a_worker_with_a_lease_that_waits_for_an_idle_engine_never_waits_itself(now: Situation):
    idle = replace(now, running=0)
    if any(lease.stage == "waiting" for lease in idle.leases):
        assert isinstance(next_action(idle), Load | Submit)
