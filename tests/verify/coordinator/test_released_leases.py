"""Leases that were given back: leased to others at once, and nothing gained by it."""

from tests.verify.coordinator.filled import key, started
from verify.coordinator.filling import MAX_OPEN_LEASES


def test_the_groups_of_a_lease_that_was_given_back_are_leased_to_others_at_once():
    run = started(groups=2)
    given_back = run.lease("x")
    assert run.lease("y").lease.step == 1  # all of step 0 is held

    run.release(given_back)

    other = run.lease("y", holding=[r.digest for r in run.state.leases.values()])
    assert (other.lease.step, other.lease.groups) == (0, 2)
    run.answer(other)
    assert [c.step for c in run.advance()] == [0]


def test_a_lease_that_was_given_back_comes_again_while_it_is_needed():
    run = started()
    given_back = run.lease("x")
    run.release(given_back)

    assert run.lease("x").document == given_back.document
    assert run.state.leases[given_back.digest].status == "open"
    run.answer(run.state.leases[given_back.digest])
    assert run.state.workers[key("x")].standing.withheld == 0


def test_a_lease_that_was_given_back_and_replaced_buys_no_other_seed():
    # given a worker that gave back all that it may hold, and others who took its groups
    run = started(async_level=3, max_groups=100)
    held: list[str] = []
    for _ in range(MAX_OPEN_LEASES):
        held.append(run.lease("x", holding=held).digest)
    for digest in held:
        run.release(run.state.leases[digest])
    for _ in range(2):
        run.work("y")
    while (record := run.lease("y")) and record.lease.step < 2:
        run.answer(record)

    # when it asks for more, then it gets none until those have expired, as if it had kept silent
    assert run.lease("x") is None
    run.now += 31.0
    run.advance()
    assert run.state.workers[key("x")].standing.withheld == len(held)
    fresh = run.lease("x")
    assert fresh is not None
    assert fresh.digest not in held
    assert fresh.lease.seed not in {run.state.leases[d].lease.seed for d in held}


def test_a_lease_that_was_given_back_holds_nothing_back():
    run = started()
    first, second = run.lease("x"), run.lease("y")
    run.answer(second)
    run.release(first)
    replacement = run.lease("y")
    run.answer(replacement)

    (closed,) = run.advance()

    assert [g.lease for g in closed.groups] == [second.digest] * 2 + [replacement.digest] * 2


def test_volunteers_who_come_and_go_do_not_use_up_what_a_step_may_lease():
    # given as many groups given back, by keys of their own, as max_groups allows
    run = started(max_groups=4)
    for name in ("first", "second"):
        run.register(name)
        run.release(run.lease(name))

    # when those who stay work
    run.work("x"), run.work("y")

    # then the step is filled by them
    (closed,) = run.advance()
    assert closed.complete


def test_many_keys_cannot_look_at_leases_faster_than_by_keeping_silent():
    # given a step that took back all the groups that it needs
    run = started(groups=2, max_groups=100)
    run.register("first"), run.register("second")
    run.release(run.lease("first"))

    # when another key gives its lease back
    seen = run.lease("second")
    run.release(seen)

    # then nobody is leased its groups before it expires
    assert run.state.leases[seen.digest].status == "open"
    assert run.lease("x").lease.step == 1
