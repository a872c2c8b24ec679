"""Who is leased what, when a step closes, and why it stalls: the rules at the head of `filling`."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.verify.coordinator.deployment import tiny_spec
from tests.verify.coordinator.documents import documents_spec
from tests.verify.coordinator.filled import Filled, key, started
from verify.coordinator.machine import events, filling, overdue
from verify.coordinator.machine.hopes import Hopes
from verify.coordinator.machine.leases import LeaseRecord, Rank
from verify.coordinator.machine.stalls import waited_for
from verify.coordinator.machine.state import Pace, Policy
from verify.coordinator.machine.transitions import replay
from verify.coordinator.machine.trust import Standing

STRANGERS = ["s1", "s2", "s3", "s4", "s5", "s6"]


def opened(*, trust: int = 0, **changes: object) -> Filled:
    """A run of two workers of its own and six strangers; s1 has earned this trust."""
    run = started(**{"async_level": 0, **changes})
    for name in STRANGERS:
        run.register(name, own=False)
    become(run, "s1", standing=Standing(delivered=trust))
    return run


def become(run: Filled, name: str, **values: object) -> None:
    worker = replace(run.state.workers[key(name)], **values)
    run.state = replace(run.state, workers=run.state.workers.insert(key(name), worker))


def standing(run: Filled, name: str) -> Standing:
    return run.state.workers[key(name)].standing


def rank(run: Filled, name: str) -> Rank:
    return run.state.workers[key(name)].rank


def leased(record: LeaseRecord) -> tuple[int, int, int]:
    return record.lease.step, record.lease.index, record.lease.groups


def test_the_policy_is_the_specs():
    algorithm = {"prompts_per_step": 10, "fill": {"max_groups": 2.55, "min_share": 0.55}}
    verify = {"newcomer_share": 0.25, "prefill_share": 0.5, "prefill_floor": 0.2}
    found = Policy.of(tiny_spec(algorithm=algorithm, verify=verify))
    assert (found.run, found.steps, found.group_size, found.async_level) == ("tiny", 3, 2, 1)
    shares = (found.groups, found.max_groups, found.min_groups, found.newcomer_groups)
    assert shares == (10, 25, 6, 2)
    assert (found.prefill_share, found.prefill_floor) == (0.5, 0.2)
    assert found.groups_per_submission == {"near": 2, "far": 2} and found.lease_timeout_s == 60.0
    documents = Policy.of(documents_spec(publish_every=3))
    assert (documents.async_level, documents.rows_per_step, documents.groups) == (5, 6, 0)


def test_steps_are_leased_ahead_as_far_as_the_lag_allows_and_no_further():
    run = started(async_level=2)
    assert [run.work("x").lease.step for _ in range(6)] == [0, 0, 1, 1, 2, 2]
    assert run.lease("x") is None
    assert [c.step for c in run.advance()] == [0, 1, 2]
    run.publish(1)
    lease = run.lease("x").lease
    assert (lease.step, lease.version) == (3, 1)


def test_groups_given_back_dropped_or_set_aside_are_leased_to_others_at_once():
    # given as many groups given back as max_groups allows, and a file that nobody can judge
    run = started(max_groups=8)
    for name in ("first", "second", "third", "fourth"):
        run.register(name)
        run.release(run.lease(name))
    poison, mixed = run.submitted("x"), run.submitted("y")
    run.judge(mixed, ["usable", "dropped"])
    assert leased(run.further("y")) == (0, 1, 1)
    run.set_aside(poison)
    # then those who stay fill the step
    assert leased(run.work("x")) == (0, 1, 2)
    run.work("y")
    (closed,) = run.advance()
    assert closed.complete and poison.digest not in {g.lease for g in closed.groups}


# -- Ranks ---------------------------------------------------------------------------------------


def test_those_who_wait_are_served_by_rank_and_then_who_was_served_longest_ago():
    run = opened(groups=8, trust=9)
    leases = []
    for name in ("x", "s2", "y", "s1"):
        run.now += 1.0
        leases.append(run.lease(name))
    turns = sorted(map(key, ["s3", "s2", "s1", "y", "x"]), key=partial(filling.turn, run.state))
    assert turns == [key(name) for name in ("x", "y", "s1", "s3", "s2")]
    # and known workers' submissions are judged first
    for record in leases:
        run.submit(record)
    judged = [record.digest for record in run.state.to_judge]
    assert judged == [leases[place].digest for place in (0, 2, 1, 3)]


def test_who_was_invited_is_known_until_the_invite_is_revoked_and_nobody_in_quarantine_is():
    run = started()
    run.record(events.WorkerRegistered(run.now, key("guest"), "a", "invite"))
    assert rank(run, "guest") is Rank.KNOWN
    run.record(events.InviteRevoked(run.now, "invite", "it was published", "operator"))
    assert rank(run, "guest") is Rank.NEW
    run.work("guest")
    assert rank(run, "guest") is Rank.RECORDED
    run.judge(run.submitted("x"), None, reason="assignment: row 0: 1 > 0")
    assert (rank(run, "x"), run.lease("x").lease.groups) == (Rank.NEW, 1)


class TestTrials:
    @pytest.mark.parametrize("deed", ["silent", "released", "rejected"])
    def test_what_was_not_accepted_takes_its_place_until_the_lease_ends(self, deed: str):
        run = opened(newcomer_groups=1)
        record = run.lease("s1")
        if deed == "released":
            run.release(record)
        elif deed == "rejected":
            run.answer(record, "rejected")
        run.now = record.expires - 0.1
        run.advance()
        assert run.further("s2") is None
        run.now = record.expires
        assert run.further("s2") is not None

    def test_what_was_accepted_trains_and_makes_room_for_the_next(self):
        run = opened(newcomer_groups=1)
        run.lease("x")
        for name in STRANGERS[:4]:
            run.work(name)
        run.work("x")
        (closed,) = run.advance()
        assert closed.complete

    def test_a_new_worker_opens_no_step_before_the_others_are_filled(self):
        run = opened(newcomer_groups=1, async_level=1)
        assert [run.further(name) is None for name in ("s1", "s2")] == [False, True]
        assert list(run.state.steps) == [0]
        run.work("x"), run.work("x")
        run.further("s2")
        assert list(run.state.steps) == [0, 1]


class TestTrust:
    def test_it_grows_with_what_was_delivered_and_each_failure_makes_the_next_dearer(self):
        run = opened(groups=100, max_groups=1000, groups_per_submission={"a": 100})

        def work(times: int) -> list[int]:
            return [run.work("s1").lease.groups for _ in range(times)]

        assert work(5) == [1, 1, 2, 4, 8]
        run.answer(run.lease("s1"), "rejected")
        assert rank(run, "s1") is Rank.NEW
        assert work(5) == [1, 1, 1, 1, 2]  # half of what it delivered since
        run.lease("s1")
        run.now += 31.0
        run.advance()
        assert (rank(run, "s1"), standing(run, "s1").withheld) == (Rank.NEW, 1)
        assert work(7) == [1] * 6 + [2]  # a third

    def test_submissions_that_can_train_no_more_do_not_count(self):
        run = opened(trust=2)
        run.submitted("s1")
        run.work("x")
        run.now += 101.0
        assert len(run.advance()) == 1 and run.state.to_judge == []
        run.publish(1)
        assert run.lease("s1").lease.groups == 2


class TestOverdue:
    """x works for 10 s at each lease, and s1 keeps silent."""

    def run(self, groups: int = 4) -> tuple[Filled, LeaseRecord]:
        run = opened(trust=9, groups=groups, lease_timeout_s=1000.0, deadline_s=1000.0)
        silent = run.lease("s1")
        record = run.lease("x")
        run.now += 10.0
        run.answer(record)
        return run, silent

    def test_a_worker_without_work_gets_the_groups_after_twice_its_own_time(self):
        run, silent = self.run()
        asking = list(map(key, [*STRANGERS, "x"]))
        due = overdue.next_overdue(run.state, asking, run.now)
        assert due == silent.lease.issued + overdue.OVERDUE_AFTER * 10.0
        run.now = due - 0.1
        assert run.lease("x") is None
        assert not Hopes(run.state, run.now)(key("x"))
        run.now = due
        assert Hopes(run.state, run.now)(key("x"))
        assert run.lease("x").lease.groups == silent.lease.groups

    def test_who_delivered_nothing_and_who_is_of_a_worse_rank_get_no_others_groups(self):
        run = opened(trust=9, lease_timeout_s=1000.0)
        first = run.further("x")
        run.further("x")
        run.now += 3.9
        for name, gets in (("y", False), ("s1", False), ("y", False)):
            assert (run.further(name) is not None) == gets
            become(run, name, pace=Pace(1.0, 0.5))
            assert name != "s1" or run.further(name) is None
        # among equals a lease is overdue after four times
        again = first.since + overdue.OVERDUE_AFTER_AMONG_EQUALS
        assert overdue.next_overdue(run.state, [key("y"), key("s1")], run.now) == again
        run.now = again
        assert run.further("s1") is None and run.further("y") is not None

    def test_its_holder_may_still_answer_and_be_trained_and_its_trust_is_gone(self):
        run, silent = self.run()
        run.now += 10.0
        other = run.lease("x")
        assert standing(run, "s1").trust == 0
        run.answer(run.state.leases[silent.digest])
        (closed,) = run.advance()
        assert {g.lease for g in closed.groups} > {silent.digest} and closed.complete
        assert standing(run, "s1").trust == 0  # late work earns no trust
        assert run.state.leases[other.digest].status == "open"

    def test_no_run_ends_while_its_holder_may_still_answer(self):
        run = started(max_groups=4, min_groups=4, lease_timeout_s=1000.0, steps=1)
        slow = run.lease("x")
        run.work("y")
        run.now += 500.0
        assert run.lease("y") is None  # all that the step may lease was leased
        assert run.state.leases[slow.digest].overdue and run.advance() == []
        run.answer(run.state.leases[slow.digest])
        assert [closed.step for closed in run.advance()] == [0]

    def test_of_many_silent_leases_only_the_longest_silent_of_each_kind_is_looked_at(self):
        """A request costs no more when thousands of leases are not answered."""
        run = opened(groups=400, trust=200, max_groups=400, newcomer_groups=400)
        for _ in range(3):
            for name in ("x", "y", *STRANGERS):
                run.now += 1.0
                run.further(name)
        kinds = {(r.rank, r.lease.groups): r for r in reversed(run.state.live)}
        del kinds[Rank.NEW, 1]
        assert len(kinds) == 2 and run.state.leases.silent == list(kinds.values())[::-1]


deeds = st.lists(
    st.tuples(
        st.sampled_from(STRANGERS), st.sampled_from(["ask", "work", "release", "reject", "wait"])
    ),
    max_size=60,
)


@settings(max_examples=50, derandomize=True)
@given(deeds, st.integers(2, 7), st.integers(1, 6), st.integers(1, 3))
def test_a_step_fills_by_one_known_worker_whatever_strangers_did_and_do(
    deeds, groups, newcomers, per_submission
):
    # given a worker that takes a second for a group, and strangers that did whatever they liked
    # while it was away
    run = opened(
        groups=groups,
        min_groups=groups,
        max_groups=groups,
        newcomer_groups=newcomers,
        groups_per_submission={"a": per_submission},
        lease_timeout_s=1e6,
        deadline_s=1e9,
        steps=1000,
    )
    own = run.lease("x")
    run.now += own.lease.groups
    run.answer(own)

    def advance() -> None:
        if run.advance():
            run.publish(run.state.next_close)

    for name, deed in deeds:
        mine = [r for r in run.state.leases.values() if r.lease.worker == key(name)]
        held = [r for r in mine if r.status == "open"]
        if deed == "ask":
            run.further(name)
        elif deed == "wait":
            run.now += 7.0
            advance()
        elif held and deed == "release":
            run.release(held[0])
        elif held:
            run.answer(held[0], "rejected" if deed == "reject" else "usable")
    advance()

    # when it asks, always after all of them, and they never answer
    begun, first = run.now, run.state.next_close
    while run.state.next_close == first:
        for name in STRANGERS:
            run.further(name)
        if record := run.lease("x"):
            run.now += record.lease.groups
            run.answer(record)
        else:
            run.now = overdue.next_overdue(run.state, [key("x")], run.now)
        run.advance()

    # then the step is closed within its own time, and the patience that it has with them
    assert run.now - begun <= groups + overdue.OVERDUE_AFTER * per_submission


@pytest.mark.parametrize("slow_s", [40.0, 100.0])
def test_who_is_slow_gets_smaller_leases_which_train_and_hold_no_step(slow_s: float):
    # given two workers that take ten seconds a group, and one that takes much longer
    seconds = {"x": 10.0, "y": 10.0, "slow": slow_s}
    run = started(
        groups=8,
        groups_per_submission={"a": 4},
        max_groups=1000,
        async_level=3,
        lease_timeout_s=1e6,
        deadline_s=1e9,
        steps=1000,
    )
    run.register("slow")
    busy: dict[str, tuple[float, LeaseRecord]] = {}
    closed: list[float] = []
    while len(closed) < 30:
        idle = [name for name in seconds if name not in busy]
        for name in sorted(idle, key=lambda name: filling.turn(run.state, key(name))):
            if record := run.lease(name):
                busy[name] = run.now + seconds[name] * record.lease.groups, record
        asking = [key(name) for name in seconds if name not in busy]
        times = [end for end, _ in busy.values()]
        run.now = min(filter(None, [*times, overdue.next_overdue(run.state, asking, run.now)]))
        for name in [name for name, (end, _) in busy.items() if end <= run.now]:
            _, record = busy.pop(name)
            if record.digest in run.state.leases:  # else the step is long closed
                run.answer(record)
        if ended := run.advance():
            closed += [run.now] * len(ended)
            run.publish(run.state.next_close)
    # then its first lease was whole, later ones are small, and their groups train
    mine = {
        event.digest: event.lease.groups
        for event in run.events
        if isinstance(event, events.LeaseGranted) and event.lease.worker == key("slow")
    }
    first, *later = mine
    assert mine[first] == 4 and max(mine[lease] for lease in later) <= 2
    trained = Counter(
        group.lease in later
        for event in run.events
        if isinstance(event, events.StepClosed)
        for group in event.trained
    )
    given = sum(mine[lease] for lease in later[:-1])  # the last one may be under way
    assert trained[True] >= 0.8 * given > 4
    # and once it is known, no step waits for it
    assert max(end - begun for begun, end in itertools.pairwise(closed[-15:])) <= 80.0


def test_a_ledger_is_read_though_its_pool_has_left_the_spec():
    run = started()
    run.work("x")
    gone = replace(run.state.policy, groups_per_submission={})
    assert replay(gone, run.events).workers == run.state.workers


# -- Deadlines and stalls ------------------------------------------------------------------------


def test_the_deadline_closes_a_step_with_its_share_and_a_late_group_trains_a_step_later():
    run = started(lease_timeout_s=1000.0)
    late, prompt = run.lease("x"), run.lease("y")
    run.answer(prompt)
    assert filling.next_due(run.state, run.now) == run.now + 100.0
    run.now += 99.9
    assert run.advance() == []
    run.now += 0.1
    (closed,) = run.advance()
    assert not closed.complete and {g.lease for g in closed.groups} == {prompt.digest}
    run.answer(late)
    own = run.lease("y")
    assert leased(own) == (1, 0, 2)
    assert filling.needed_groups(run.state, 1) == 0  # the late ones count
    run.answer(own)
    (closed,) = run.advance()
    assert closed.complete
    assert [g.lease for g in closed.groups] == [late.digest] * 2 + [own.digest] * 2


def test_a_step_waits_past_its_deadline_says_for_whom_and_goes_on_when_they_come():
    run = started(lease_timeout_s=1000.0)
    held, submitted = run.lease("x"), run.lease("y")
    run.submit(submitted)
    run.now += 100.0
    assert run.advance() == []
    assert waited_for(run.state) == f"worker {key('x')[:16]}, validators (1 submissions)"
    run.answer(held)
    (closed,) = run.advance()  # no lease is waited for any more
    assert (len(closed.groups), closed.complete) == (2, False)


def test_known_workers_use_up_max_groups_and_a_further_start_counts_anew():
    run = started(max_groups=6)
    run.work("x", "filtered"), run.work("y", "filtered"), run.work("x")
    assert filling.leasable_groups(run.state, 0, Rank.KNOWN, run.now) == 0
    (closed,) = run.advance()
    assert (len(closed.groups), closed.complete) == (2, False)
    run = started(max_groups=4)
    run.work("x", "filtered"), run.work("y", "filtered")
    assert "4 groups leased (max_groups allows 4)" in run.stalled().reason
    run.record(events.CoordinatorStarted(run.now))
    run.work("x"), run.work("y")
    assert len(run.advance()) == 1


NO_GOLD = "p7: KeyError: 'gold' at my_rewards/grading.py:17"


def judged(*outcomes: str, **how: object) -> Callable[[Filled, LeaseRecord], None]:
    def lose(run: Filled, record: LeaseRecord) -> None:
        run.submit(record)
        run.judge(record, outcomes * 2 or None, **how)

    return lose


def set_aside(run: Filled, record: LeaseRecord) -> None:
    run.submit(record)
    run.set_aside(record)


@pytest.mark.parametrize(
    ("lose", "reason", "remedy"),
    [
        (
            judged("dropped", fault=NO_GOLD),
            f"4 groups dropped by the grader, the newest: {NO_GOLD}",
            "python -m sampler grade FILE.jsonl",
        ),
        (
            judged("filtered", task_reward=0.0),
            "the model solves none of these problems (mean task reward 0)",
            "take easier problems",
        ),
        (
            judged("filtered", task_reward=0.0, answered=0),
            "4 groups without an answer in the form that the run asks for",
            "data.thinking",
        ),
        (
            judged("filtered", task_reward=1.0),
            "the model solves all of these problems (mean task reward 1)",
            "take harder problems",
        ),
        (
            judged("filtered", task_reward=0.5),
            "the model solves each of these problems always or never (mean task reward 0.5)",
            "keep the problems between",
        ),
        (
            judged(reason="toploc: row 3"),
            "2 submissions rejected (4 groups), last rejection: toploc: row 3",
            "the last rejection names",
        ),
        (set_aside, "4 groups of submissions that validators could not judge", "coordinator.log"),
        (lambda run, record: None, "4 groups withheld or late", "runspec workers"),
    ],
)
def test_each_cause_of_a_stall_has_its_remedy_and_stalls_once_all_is_judged(lose, reason, remedy):
    run = started(max_groups=4)
    for name in ("x", "y"):
        record = run.lease(name)
        assert filling.decide_close(run.state, run.now) is None
        lose(run, record)
    run.now += 30.0
    assert run.advance() == []
    stalled = run.stalled()
    assert reason in stalled.reason and remedy in stalled.remedy
    assert "step 0 stalled: 0 of 4 groups, at least 2 needed" in stalled.reason
    assert "4 groups leased (max_groups allows 4)" in stalled.reason
    for words in ("solve-rates RUN_DIR/spec.json", "algorithm.filters.zero_variance: false"):
        assert (words in stalled.remedy) == ("filtered" in stalled.reason)


def test_the_largest_loss_comes_first():
    run = started(max_groups=6)
    run.work("x", "rejected"), run.work("y", "filtered"), run.work("x", "filtered")
    reason = run.stalled().reason
    assert 0 < reason.index("4 groups filtered") < reason.index("1 submissions rejected (2 groups)")


def test_a_run_whose_own_workers_are_all_banned_stalls_once_nothing_is_awaited():
    run = started()
    submitted = run.submitted("x")
    for name in "xy":
        run.record(events.KeyBanned(run.now, key(name), "edited", events.BY_OPERATOR))
    assert filling.decide_close(run.state, run.now) is None
    run.judge(submitted, ["usable", "usable"])
    words = "step 0 stalled: every worker is banned, the run's own too: edited"
    assert run.stalled().reason == words
    # and a stranger that may come keeps the run going
    run.register("s1", own=False)
    assert filling.decide_close(run.state, run.now) is None


@pytest.mark.parametrize(
    ("published", "workers", "expected"),
    [
        (False, 0, "the publisher: version 0 is needed, the newest published is none"),
        (True, 0, "a worker to register"),
        (True, 1, "a lease request of any of the 1 registered workers"),
    ],
)
def test_a_run_waits_for_workers_without_end_and_stalls_without_a_version(
    published: bool, workers: int, expected: str
):
    run = Filled()
    if published:
        run.publish(0)
    for number in range(workers):
        run.register(f"worker {number}")
    run.now += filling.IDLE_DEADLINE_S - 0.1
    assert run.advance() == []
    run.now += 0.1
    assert waited_for(run.state) == expected
    if run.state.newest is None:
        assert f"not opened after 900 s; waited for {expected}" in run.stalled().reason
    else:
        assert run.advance() == []
