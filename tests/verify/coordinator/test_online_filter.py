"""The online filter: groups without variance are replaced until the step is full, within a cap."""

from __future__ import annotations

import random

import pytest

from runspec.core.spec.load import SpecFiles
from runspec.lint.check import check_spec
from tests.runspec.core.spec.spec_files import SPECS
from tests.verify.coordinator.filled import Filled, key, policy
from verify.coordinator import filling
from verify.coordinator.filling import Close
from verify.coordinator.policy import Policy
from verify.formats.lease import assignments


def started(**changes: object) -> Filled:
    run = Filled(policy(**changes))
    for name in ("x", "y"):
        run.register(name)
    run.publish(0)
    return run


def fill(
    run: Filled, outcomes: list[list[str]], usable: list[tuple[str, int]] | None = None
) -> list[Close]:
    """Two workers by turns lease and answer until step 0 closes or no more of it is leased.

    Args:
        run: with step 0 not open yet.
        outcomes: of the groups of each lease; those beyond are usable.
        usable: gets the usable groups, in the order in which they were leased.
    """
    left = list(outcomes)
    for turn in range(100):
        record = run.lease("xy"[turn % 2])
        if record is None or record.lease.step != 0:
            break
        said = left.pop(0) if left else ["usable"] * record.lease.groups
        said = said[: record.lease.groups]
        run.submit(record)
        run.judge(record, said)
        if usable is not None:
            usable += [(record.digest, i) for i, one in enumerate(said) if one == "usable"]
        if closed := run.advance():
            return closed
    return run.advance()


def test_filtered_groups_are_replaced_by_further_ones_until_the_step_is_full() -> None:
    # Given a step of 4 groups, of which the first five in lease order have no variance
    outcomes = [["filtered", "filtered"], ["filtered", "usable"], ["filtered", "usable"]]
    outcomes += [["filtered", "filtered"]]
    run = started(max_groups=40)

    # When workers go on as they are leased
    usable: list[tuple[str, int]] = []
    (closed,) = fill(run, outcomes, usable)

    # Then the batch is full, of groups with variance alone, in lease order
    assert closed.complete
    assert [(one.lease, one.group) for one in closed.groups] == usable[:4]
    assert run.state.workers[key("x")].standing.rejected == 0


def test_no_more_is_leased_than_would_fill_the_step_if_all_were_usable() -> None:
    # given three groups in hand and one that was filtered
    run = started(max_groups=40)
    first = run.lease("x")
    assert first is not None
    run.submit(first)
    run.judge(first, ["usable", "filtered"])
    run.work("y")
    # when another is asked for, then it is the one that is missing
    replacement = run.lease("x")
    assert replacement is not None
    assert (replacement.lease.step, replacement.lease.groups) == (0, 1)
    further = run.lease("y")
    assert further is None or further.lease.step == 1


def test_replacements_are_drawn_anew_and_by_nobodys_choice() -> None:
    # Given a step whose first groups were all filtered
    run = started(max_groups=40)
    fill(run, [["filtered", "filtered"]] * 6)

    # Then every lease has a seed of its own, so the replacements are other draws of problems
    leases = [record.lease for record in run.state.leases.values() if record.lease.step == 0]
    assert len(leases) >= 8
    assert len({lease.seed for lease in leases}) == len(leases)
    drawn = [
        one.problem
        for lease in leases
        for one in assignments(lease, n_problems=10**9, targets=[8, 16])
    ]
    assert len(set(drawn)) == len(drawn)


def test_the_cap_ends_the_replacing_and_never_more_is_leased() -> None:
    # Given groups of which none has variance, and 10 that may be leased
    run = started(max_groups=10)
    assert fill(run, [["filtered", "filtered"]] * 50) == []

    # Then just so many were leased, and the run says what it was that filled nothing
    assert run.state.steps[0].leased == 10
    assert filling.leasable_groups(run.state, 0) == 0
    reason = run.stalled()
    assert "0 of 4 groups" in reason
    assert "10 groups leased (max_groups allows 10)" in reason
    assert "10 filtered (all rewards equal)" in reason


def test_at_the_cap_a_step_with_enough_closes_and_says_that_it_is_not_full() -> None:
    run = started(max_groups=10, min_groups=2)
    outcomes = [["filtered", "filtered"]] * 3 + [["usable", "usable"]]
    outcomes += [["filtered", "filtered"]] * 9
    (closed,) = fill(run, outcomes)
    assert not closed.complete
    assert len(closed.groups) == 2


@pytest.mark.parametrize("seed", range(20))
def test_whatever_is_filtered_a_step_is_full_or_its_cap_is_reached(seed: int) -> None:
    draw = random.Random(seed)
    share = draw.choice([0.2, 0.5, 0.9])
    outcomes = [
        [draw.choices(["filtered", "usable"], [share, 1 - share])[0] for _ in range(2)]
        for _ in range(60)
    ]
    run = started(max_groups=12, min_groups=1)
    closed = fill(run, outcomes)
    leased = run.state.steps[0].leased if 0 in run.state.steps else 12
    assert leased <= 12
    if closed:
        assert closed[0].complete or leased == 12
    else:
        assert leased == 12


def test_the_cap_is_max_groups_times_the_need() -> None:
    overrides = ("algorithm.filters.zero_variance=true", "algorithm.fill.max_groups=2.5")
    files = SpecFiles(SPECS / "target_short.yaml", profile="laptop", overrides=overrides)
    made = Policy.of(check_spec(files).require())
    assert made.groups == 16
    assert made.max_groups == 40
    assert made.zero_variance_filter
