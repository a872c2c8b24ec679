"""The discrete-event model: what must hold of any run, and runs small enough to reckon by hand."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runspec.estimate.steady import timeline
from runspec.estimate.timeline import PUBLISHER, Interval, Model, Replica, Simulated, simulate

EVERY_RUN = settings(deadline=None, derandomize=True, max_examples=60)
EXACT = 1e-6
"""Times are sums of floats."""


def replica(pool="pool", *, fetch_s=0.0, load_s=0.0, lease_groups=1, token_s=1.0) -> Replica:
    return Replica(pool, fetch_s, load_s, lease_groups, lambda lengths: token_s * sum(lengths))


def model(*replicas: Replica, **changes: object) -> Model:
    """One group of one token a step, and everything but training takes no time."""
    plain = Model(
        steps=4,
        groups=1,
        async_level=0,
        train_s=10.0,
        publish_s=0.0,
        replicas=replicas or (replica(),),
        validators=0,
        check_s=lambda lengths: 0.0,
        lengths=lambda step, group: [1.0],
        filtered=lambda step, group: False,
    )
    return replace(plain, **changes)  # type: ignore[arg-type]


def drawn(seed: int, filtered_share: float):
    """Lengths and filter of every group."""

    def lengths(step: int, group: int) -> list[float]:
        random = Random(f"{seed}/{step}/{group}")
        return [random.uniform(1, 9) for _ in range(3)]

    def filtered(step: int, group: int) -> bool:
        return Random(f"{seed}/{step}/{group}/filter").random() < filtered_share

    return {"lengths": lengths, "filtered": filtered}


SECONDS = st.floats(0, 30)
REPLICAS = st.lists(
    st.builds(
        replica,
        st.sampled_from(["pool", "other"]),
        fetch_s=SECONDS,
        load_s=SECONDS,
        lease_groups=st.integers(1, 5),
        token_s=st.floats(0.01, 3),
    ),
    min_size=1,
    max_size=4,
)


@st.composite
def models(draw: st.DrawFn) -> Model:
    check_s = draw(st.floats(0, 3))
    return model(
        *draw(REPLICAS),
        steps=draw(st.integers(1, 7)),
        groups=draw(st.integers(1, 9)),
        async_level=draw(st.integers(0, 3)),
        train_s=draw(SECONDS),
        publish_s=draw(SECONDS),
        validators=draw(st.integers(0, 3)),
        check_s=lambda lengths: check_s * len(lengths),
        max_groups=draw(st.floats(1, 4)),
        **drawn(draw(st.integers(0, 2**32)), draw(st.sampled_from([0.0, 0.2, 0.9]))),
    )


def busy(run: Simulated) -> dict[tuple[str, int], list[Interval]]:
    """Intervals by who spent them, in order of time; links fetch beside what else is done."""
    found = defaultdict(list)
    for interval in run.intervals:
        found[interval.role, interval.member].append(interval)
    return {who: sorted(mine, key=lambda i: (i.start, i.end)) for who, mine in found.items()}


@EVERY_RUN
@given(models())
def test_what_holds_of_any_run(model):
    run = simulate(model)
    what_is_leased_is_checked_and_trained_or_filtered(run, model)
    causes_come_before_their_effects(run, model)
    a_version_is_published_fetched_and_loaded_before_it_samples(run)
    # no step trains on more lag than it may
    assert all(0 <= step.lag <= model.async_level for step in run.steps)
    # and nobody does two things at once
    for mine in busy(run).values():
        for before, after in pairwise(mine):
            assert before.end <= after.start + EXACT


def what_is_leased_is_checked_and_trained_or_filtered(run: Simulated, model: Model) -> None:
    for step in run.steps:
        assert step.leased == step.checked == step.kept + step.filtered
        assert step.kept <= model.groups
        assert step.leased <= max(model.groups, model.max_groups * model.groups)
        if step.kept < model.groups:  # max_groups is spent
            assert step.leased == int(model.max_groups * model.groups)
        numbers = range(step.leased)
        assert step.filtered == sum(model.filtered(step.number, group) for group in numbers)
        tokens = sum(sum(model.lengths(step.number, group)) for group in numbers)
        assert step.tokens == pytest.approx(tokens)


def causes_come_before_their_effects(run: Simulated, model: Model) -> None:
    for step in run.steps:
        assert step.opened is not None and step.full is not None
        assert step.first_rollouts is not None
        assert step.opened <= step.first_rollouts <= step.full <= step.train_start <= step.trained
    for before, after in pairwise(run.steps):
        assert before.full is not None and after.full is not None
        assert before.full <= after.full
        assert before.trained <= after.train_start
    for step in run.steps[model.async_level + 1 :]:
        # Version s - async_level must be out before anything of step s is sampled.
        assert step.opened is not None
        allowed = run.steps[step.number - model.async_level - 1].trained + model.publish_s
        assert step.opened >= allowed - EXACT


def a_version_is_published_fetched_and_loaded_before_it_samples(run: Simulated) -> None:
    published = {0: 0.0} | {i.step: i.end for i in run.intervals if i.role == PUBLISHER}
    for (role, _), mine in busy(run).items():
        loads = [i for i in mine if i.what == "load"]
        assert [i.step for i in loads] == sorted({i.step for i in loads})
        if any(i.what == "sample" for i in mine):
            assert mine[0].what == "load", role
        for interval in mine:
            if interval.what in ("fetch", "load"):
                assert interval.start >= published[interval.step] - EXACT


@EVERY_RUN
@given(st.integers(1, 6), *[SECONDS] * 4, st.floats(0.1, 3), st.floats(0, 3))
def test_in_step_a_step_is_its_parts(n, publish_s, fetch_s, load_s, train_s, token_s, check_s):
    one = replica(fetch_s=fetch_s, load_s=load_s, lease_groups=n, token_s=token_s)
    times = {"train_s": train_s, "publish_s": publish_s}
    times |= {"validators": 1, "check_s": lambda lengths: check_s * len(lengths)}
    run = simulate(model(one, groups=n, **times))
    parts = publish_s + fetch_s + load_s + n * (token_s + check_s) + train_s
    for before, after in pairwise(run.steps):
        assert after.trained - before.trained == pytest.approx(parts)


def test_with_lag_the_learner_never_waits_for_quick_samplers():
    run = simulate(model(replica(token_s=4.0), async_level=2, steps=10))
    gaps = [after.train_start - before.trained for before, after in pairwise(run.steps)]
    assert gaps == [0.0] * 9


def test_a_slow_link_holds_up_only_what_waits_for_it():
    run = simulate(model(replica(fetch_s=100.0, token_s=1.0), async_level=1, steps=3))
    # Version 0 takes 100 s. Steps 0 and 1 are sampled from it; step 2 needs version 1, which is
    # out when step 0 is trained, at 111 s, and there at 211 s.
    assert [step.full for step in run.steps] == [101.0, 102.0, 212.0]
    assert [step.lag for step in run.steps] == [0, 1, 1]


def test_a_step_that_filters_everything_closes_empty_at_its_limit():
    all_dropped = model(groups=4, max_groups=2.5, filtered=lambda step, group: True)
    step = simulate(all_dropped).steps[0]
    assert (step.leased, step.kept) == (10, 0)
    assert step.full == 10.0 and step.trained == step.train_start


@pytest.mark.parametrize(
    ("token_s", "lag", "step_s", "idle", "bottleneck"),
    [
        (1.0, 2, 10.0, {"learner": 0.0, "pool": 0.9}, "learner"),
        (40.0, 2, 40.0, {"learner": 0.75, "pool": 0.0}, "pool"),
        # in step everybody waits for everybody
        (30.0, 0, 40.0, {"learner": 0.75, "pool": 0.25}, "pool"),
    ],
)
def test_who_never_waits_is_the_bottleneck(token_s, lag, step_s, idle, bottleneck):
    run = timeline(model(replica(token_s=token_s), async_level=lag, train_s=10.0))
    assert run.step_s == pytest.approx(step_s)
    assert {role: run.idle[role] for role in idle} == pytest.approx(idle)
    assert run.bottleneck == bottleneck
    if lag == 0:
        assert (run.lag, run.full_s) == (0.0, pytest.approx(token_s))
    else:
        assert run.gains[bottleneck] > 0
        assert sum(run.gains.values()) == pytest.approx(run.gains[bottleneck])


@settings(EVERY_RUN, max_examples=15)
@given(models())
def test_shares_are_shares(model):
    run = timeline(replace(model, train_s=1.0 + model.train_s))
    assert all(-1e-9 <= share <= 1.0 + 1e-9 for share in run.idle.values())
    assert all(0.0 <= i.start <= i.end <= run.step_s * 30 for i in run.intervals)
    assert run.bottleneck in run.gains
    assert 0.0 <= run.lag <= model.async_level and run.step_s >= 0.0
