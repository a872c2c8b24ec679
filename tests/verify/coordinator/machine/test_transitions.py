"""The state machine: what every sequence of events keeps, which cannot follow, what counts."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import replace
from math import inf

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.verify.coordinator.filled import (
    FAILED,
    POLICY,
    STEADY,
    Filled,
    digest,
    key,
    policy,
    started,
    submission_of,
)
from verify.coordinator.machine import events, filling, overdue
from verify.coordinator.machine.events import BY_OPERATOR, IllegalTransition
from verify.coordinator.machine.filling import Close
from verify.coordinator.machine.hopes import Hopes
from verify.coordinator.machine.leases import Leases, Rank
from verify.coordinator.machine.state import Pace, Tally
from verify.coordinator.machine.transitions import LONGEST_DEFERRAL_S, apply, replay
from verify.coordinator.machine.trust import BAN_AFTER
from verify.formats.lease import MAX_OPEN_LEASES

OWN, STRANGERS = ["a", "b"], ["c", "d", "e"]
WORKERS = [*OWN, *STRANGERS]
OUTCOMES = ["usable", "usable", "usable", "filtered", "dropped"]
REASONS = ["logprobs: row 0: 0.2 > 0.1", "toploc: row 1: 40 > 38", "format: no rows"]


class Watched(Filled):
    """Looks at each lease and each batch beside the state that it was decided in."""

    def record(self, event: events.Event) -> None:
        before = self.state
        super().record(event)
        if isinstance(event, events.LeaseGranted):
            self.a_lease_is_within_the_bounds_of_its_rank(before, event.lease)
        elif isinstance(event, events.StepClosed):
            self.a_batch_is_in_lease_order_rank_by_rank(before, event)

    def a_lease_is_within_the_bounds_of_its_rank(self, before, lease):
        worker, rank = before.workers[lease.worker], before.workers[lease.worker].rank
        mine = [r for r in before.leases.values() if r.lease.worker == lease.worker]
        late = before.policy.async_level
        held = [r for r in mine if r.status == "open"]
        held += [r for r in mine if r.status == "submitted" and before.lag(r) <= late]
        assert (lease.version, lease.issued) == (before.newest.version, self.now)
        assert lease.expires == self.now + before.policy.lease_timeout_s
        if rank is Rank.NEW:
            assert (lease.groups, held) == (1, [])
            tried = filling.tried_groups(self.state, lease.step, self.now)
            assert tried <= before.policy.newcomer_groups
        else:
            assert worker.standing.quarantine is None and not worker.probation
            assert lease.groups <= filling.needed_groups(before, lease.step)
        if rank is Rank.RECORDED:
            groups = sum(r.lease.groups for r in held) + lease.groups
            assert groups <= worker.standing.trust

    def a_batch_is_in_lease_order_rank_by_rank(self, before, event):
        order = list(before.leases)
        places = []
        for group in event.trained:
            record = before.leases[group.lease]
            rank = -1 if record.lease.step < event.step else record.rank
            places.append((rank, order.index(group.lease), group.group))
        assert places == sorted(places)
        policy = before.policy
        assert policy.min_groups <= len(places) <= policy.groups
        timed_out = event.at >= before.steps[event.step].since + policy.deadline_s
        if len(places) == policy.groups and not timed_out:
            for place, record in enumerate(before.leases.values()):
                if record.lease.step == event.step and record.awaited:
                    assert all(of != record.rank or at < place for of, at, _ in places)


class Filling(RuleBasedStateMachine):
    """Workers, validators, the publisher and the clock do as they please."""

    @initialize(
        groups=st.integers(1, 6),
        async_level=st.integers(0, 3),
        max_groups=st.sampled_from([1, 2, 4, 1000]),
        per_submission=st.integers(1, 4),
        min_groups=st.integers(1, 2),
        newcomer_groups=st.integers(1, 6),
        lease_timeout_s=st.sampled_from([30.0, 1000.0]),  # the deadline of a step is 100 s
        steps=st.sampled_from([6, 100]),
    )
    def begin(self, groups, max_groups, per_submission, min_groups, **others):
        self.run = Watched(
            policy(
                groups=groups,
                max_groups=max_groups * groups,
                min_groups=min(min_groups, groups),
                groups_per_submission={"a": per_submission},
                **others,
            )
        )
        self.run.register("a")
        self.run.publish(0)
        self.closed: list[Close] = []

    @rule(behind=st.integers(0, 2))
    def publish(self, behind):
        """The learner is as fast as the batches, or a little behind."""
        first = self.run.state.newest.version + 1
        for version in range(first, self.run.state.next_close - behind + 1):
            self.run.publish(version)

    @rule(name=st.sampled_from(WORKERS), holds=st.booleans())
    def lease(self, name, holds):
        if key(name) not in self.run.state.workers:
            self.run.register(name, own=name in OWN)
        before = self.run.state
        mine = [d for d, r in before.leases.items() if r.lease.worker == key(name)]
        found = self.run.lease(name, holding=mine if holds else ())
        assert found is None or key(name) not in before.bans
        if found is not None and found.digest in before.leases:
            assert found.digest not in mine or not holds or found.deferred is not None
            assert found.status == "open" and found.expires > self.run.now

    @rule(name=st.sampled_from(WORKERS), outcomes=st.lists(st.sampled_from(OUTCOMES), max_size=6))
    def work(self, name, outcomes):
        """One lease after the other, while there is something to lease."""
        for outcome in outcomes:
            self.lease(name, holds=False)
            mine = [r for r in self.of("open") if r.lease.worker == key(name)]
            if mine:
                self.run.answer(mine[0], outcome)
        self.advance()

    @precondition(lambda self: self.of("open"))
    @rule(data=st.data())
    def submit(self, data):
        self.run.submit(data.draw(st.sampled_from(self.of("open"))))

    @precondition(lambda self: self.of("open"))
    @rule(data=st.data(), seconds=st.sampled_from([20.0, 90.0]))
    def defer(self, data, seconds):
        """Too many submissions wait for a verdict: the lease lasts longer, for this one."""
        record, now = data.draw(st.sampled_from(self.of("open"))), self.run.now
        late = self.run.state.lag(record) > self.run.state.policy.async_level
        if now < record.expires < now + seconds and not late:
            brought = submission_of(record)
            self.run.record(events.SubmissionDeferred(now, record.digest, brought, now + seconds))
            over = filling.expired_leases(self.run.state, now + seconds - 1.0)
            assert record.digest not in {each.digest for each in over}

    @precondition(lambda self: self.of("open"))
    @rule(data=st.data())
    def release(self, data):
        self.run.release(data.draw(st.sampled_from(self.of("open"))))

    @precondition(lambda self: self.of("submitted"))
    @rule(data=st.data(), accepted=st.sampled_from([True, True, True, False]))
    def judge(self, data, accepted):
        record = data.draw(st.sampled_from(self.of("submitted")))
        size, reason = record.lease.groups, data.draw(st.sampled_from(REASONS))
        groups = data.draw(st.lists(st.sampled_from(OUTCOMES), min_size=size, max_size=size))
        recomputed = data.draw(st.booleans())
        self.run.judge(record, groups if accepted else None, reason=reason, recomputed=recomputed)
        judged = self.run.state.leases[record.digest]
        assert not (self.run.state.workers[judged.lease.worker].probation and judged.usable)

    @precondition(lambda self: self.of("submitted"))
    @rule(data=st.data())
    def set_aside(self, data):
        self.run.set_aside(data.draw(st.sampled_from(self.of("submitted"))))

    @rule(name=st.sampled_from(WORKERS))
    def reject(self, name):
        """A worker samples badly again and again."""
        if key(name) in self.run.state.workers:
            for _ in range(BAN_AFTER):
                if record := self.run.lease(name):
                    self.run.answer(record, "rejected")

    @rule(name=st.sampled_from(WORKERS))
    def change_probation(self, name):
        """A profile of its devices comes or goes."""
        if worker := self.run.state.workers.get(key(name)):
            self.run.record(events.ProbationChanged(self.run.now, key(name), not worker.probation))

    @rule(name=st.sampled_from(WORKERS))
    def ban_or_pardon(self, name):
        if key(name) in self.run.state.bans:
            self.run.record(events.BanLifted(self.run.now, key(name), "an appeal", BY_OPERATOR))
        else:
            self.run.record(events.KeyBanned(self.run.now, key(name), "by hand", BY_OPERATOR))
            assert not [r for r in self.of("open") if r.lease.worker == key(name)]

    @rule(seconds=st.sampled_from([1.0, 10.0, 31.0, 101.0]))
    def wait(self, seconds):
        self.run.now += seconds
        self.advance()

    @rule()
    def restart(self):
        """The deadlines of open steps, and what they may lease, begin again."""
        self.run.record(events.CoordinatorStarted(self.run.now))
        found = {(step.since, step.leased) for step in self.run.state.steps.values()}
        assert found <= {(self.run.now, 0)} and self.run.state.progress == self.run.now

    @rule(leases=st.integers(1, 3), late=st.sampled_from("abc"), prompt=st.sampled_from("abd"))
    def straggle(self, leases, late, prompt):
        """One answer comes after its step was closed at the deadline, if its lease lasts."""
        self.lease(late, holds=False)
        self.work(prompt, ["usable"] * leases)
        self.wait(101.0)
        for record in self.of("open"):
            self.run.answer(record)
        self.work(prompt, ["usable"] * 6)

    @rule()
    def advance(self):
        self.closed += self.run.advance()

    def of(self, status):
        return [r for r in self.run.state.leases.values() if r.status == status]

    @invariant()
    def every_step_has_at_most_one_batch_and_in_order(self):
        assert [c.step for c in self.closed] == list(range(len(self.closed)))
        assert self.run.state.next_close == len(self.closed)

    @invariant()
    def no_step_is_leased_beyond_its_bounds(self):
        policy = self.run.state.policy
        for number, step in self.run.state.steps.items():
            assert 0 <= step.leased <= policy.max_groups
            assert number - self.run.state.newest.version <= policy.async_level

    @invariant()
    def a_worker_holds_only_so_many_leases_and_a_banned_key_none(self):
        held = Counter(r.lease.worker for r in self.of("open") if r.expires > self.run.now)
        assert max(held.values(), default=0) <= MAX_OPEN_LEASES
        assert not held.keys() & set(self.run.state.bans)

    @invariant()
    def time_alone_is_announced(self):
        """If nothing can be decided now, `next_due` lies ahead; else the clock would never wake."""
        state, now = self.run.state, self.run.now
        undecided = not filling.expired_leases(state, now) and not filling.decide_close(state, now)
        assert not undecided or self.ahead(filling.next_due(state, now))
        ends = [record.expires for record in self.of("open")]
        assert len(filling.expired_leases(state, now)) == sum(end <= now for end in ends)
        assert state.leases.next_end(now) <= min((e for e in ends if e > now), default=inf)
        assert self.ahead(overdue.next_overdue(state, state.workers, now))

    def ahead(self, due):
        return due is None or due > self.run.now

    @invariant()
    def what_follows_from_all_leases_is_kept_up_to_date(self):
        def seen(leases):
            silent = sorted((r.rank, r.lease.groups, r.since) for r in leases.silent)
            ordered = [*leases.live.items()], [*leases.submitted.items()], silent
            by_worker = {worker: list(records) for worker, records in leases.unsettled.items()}
            sums = (
                +leases.awaited,
                +leases.undecided,
                +leases.usable,
                dict(leases.trials),
                dict(leases.submissions),
            )
            return ordered, by_worker, sums

        leases, state = self.run.state.leases, self.run.state
        assert seen(leases) == seen(Leases(leases, state.next_close))
        awaited = [r for r in leases.values() if r.awaited and r.rank is not Rank.NEW]
        assert sum(r.lease.groups for r in awaited) == leases.awaited.total()
        assert sum(len(r.usable) for r in leases.values()) >= leases.usable.total()

    @invariant()
    def whoever_could_get_a_lease_is_asked(self):
        """`Hopes` leaves out nobody for whom there is work."""
        state, now = self.run.state, self.run.now
        hopeful = filter(Hopes(state, now), state.workers)
        served = [k for k in state.workers if filling.decide_lease(state, k, now) is not None]
        assert set(served) <= set(hopeful)

    @invariant()
    def nothing_trains_on_the_word_of_a_worker_in_doubt(self):
        state = self.run.state
        for record in state.leases.values():
            worker = state.workers[record.lease.worker]
            if worker.standing.quarantine is not None or record.lease.worker in state.bans:
                assert record.recomputed or record.usable == ()
        assert state.unproven == sum(worker.unproven for worker in state.workers.values())

    def teardown(self):
        """What is a matter of the whole history is looked at once, at its end."""
        if not hasattr(self, "run"):
            return
        assert replay(self.run.state.policy, self.run.events) == self.run.state
        self.leases = {
            e.digest: e.lease for e in self.run.events if isinstance(e, events.LeaseGranted)
        }
        self.no_group_is_trained_twice_and_none_beyond_the_lag()
        self.indices_have_no_holes_and_no_two_leases_share_a_seed()
        self.every_nonce_was_drawn_after_its_workers_key_was_known()
        self.leases_are_remembered_while_an_answer_matters()

    def no_group_is_trained_twice_and_none_beyond_the_lag(self):
        trained = [(g.lease, g.group) for c in self.closed for g in c.groups]
        assert len(trained) == len(set(trained))
        for closed in self.closed:
            for group in closed.groups:
                lag = closed.step - self.leases[group.lease].version
                assert 0 <= lag <= self.run.state.policy.async_level

    def indices_have_no_holes_and_no_two_leases_share_a_seed(self):
        leases = list(self.leases.values())
        assert len({lease.seed for lease in leases}) == len(leases)
        indices = defaultdict(list)
        for lease in leases:
            indices[lease.worker, lease.step].append(lease.index)
        assert all(found == list(range(len(found))) for found in indices.values())

    def every_nonce_was_drawn_after_its_workers_key_was_known(self):
        known: set[str] = set()
        drawn_when_known: dict[str, set[str]] = {}
        for event in self.run.events:
            if isinstance(event, events.WorkerRegistered):
                known.add(event.worker)
            elif isinstance(event, events.NonceDrawn):
                drawn_when_known[event.nonce] = set(known)
            elif isinstance(event, events.LeaseGranted):
                assert event.lease.worker in drawn_when_known[event.lease.nonce]

    def leases_are_remembered_while_an_answer_matters(self):
        state = self.run.state
        for name, lease in self.leases.items():
            recent = lease.step >= state.next_close - state.policy.async_level - 1
            waits = name in state.leases and state.leases[name].status == "submitted"
            assert (name in state.leases) == (recent or waits)


TestFilling = Filling.TestCase
TestFilling.settings = settings(STEADY, max_examples=70)


# -- Events that cannot follow -------------------------------------------------------------------


def waiting_for_events():
    """A run with a judged, a submitted and an open lease, a banned key and a revoked invite."""
    run = started(steps=5, async_level=0)
    judged, submitted = run.work("x"), run.lease("y")
    run.submit(submitted)
    run.register("z")
    run.record(events.NonceDrawn(run.now, 0, digest("draw of z"), 3))
    opened = run.state.leases[submitted.digest]
    lease = replace(opened.lease, worker=key("z"), nonce=digest("draw of z"), index=0)
    run.record(events.LeaseGranted(run.now, lease, digest("open"), "signed"))
    run.record(events.InviteRevoked(run.now, key("invite"), "published", BY_OPERATOR))
    run.record(events.KeyBanned(run.now, key("banned"), "known from another run", BY_OPERATOR))
    return run, judged, run.state.leases[submitted.digest], run.state.leases[digest("open")]


RUN, JUDGED, SUBMITTED, OPEN = waiting_for_events()
AT, END = RUN.now, OPEN.lease.expires
HIS = submission_of(SUBMITTED)


def granted(**changes):
    lease = replace(OPEN.lease, **{"index": 1, **changes})
    return events.LeaseGranted(AT, lease, digest("other"), "signed")


def deferred(at, submission, until):
    return events.SubmissionDeferred(at, OPEN.digest, digest(submission), until)


def verdict_on(lease, submission):
    words = (digest("v"), key("validator"), False, "logprobs: 1 > 0", ())
    return events.SubmissionJudged(AT, lease, submission, *words)


def closed(step, *groups):
    return events.StepClosed(
        AT, step, tuple(events.TrainedGroup(JUDGED.digest, n) for n in groups), "signed"
    )


@pytest.mark.parametrize(
    ("event", "words"),
    [
        (events.Event(AT), "no event of a run"),
        (events.WorkerRegistered(AT, key("x"), "a"), "a key is registered twice"),
        (events.WorkerRegistered(AT, key("y2"), "a", key("invite")), "a revoked invite"),
        (events.InviteRevoked(AT, key("invite"), "again", BY_OPERATOR), "invite is revoked twice"),
        (events.WorkerQuarantined(AT, key("nobody"), "why"), "a key that is no worker's"),
        (events.QuarantineEnded(AT, key("nobody")), "a key that is no worker's"),
        (events.QuarantineEnded(AT, key("x")), "no quarantine to end"),
        (events.KeyBanned(AT, key("banned"), "again", BY_OPERATOR), "a key is banned twice"),
        (events.BanLifted(AT, key("x"), "none to lift", BY_OPERATOR), "a key that is not banned"),
        (events.VersionPublished(AT, 0, key("m")), "version 0 is not newer"),
        (events.NonceDrawn(AT, 0, key("n"), 3), "a draw that admits nobody"),
        (events.NonceDrawn(AT, 1, key("n"), 2), "a draw covers the keys registered so far"),
        (events.NonceDrawn(AT, 2, key("n"), 3), "steps open in order"),
        (granted(step=1), "of no open step"),
        (granted(worker=key("nobody")), "no known worker"),
        (replace(granted(), digest=OPEN.digest), "of no open step"),
        (granted(nonce=key("other")), "a nonce that is not its own"),
        (granted(index=0), "indices have no holes"),
        (granted(index=2), "indices have no holes"),
        (granted(version=-1), "beyond the lag"),
        (events.LeaseExpired(AT, JUDGED.digest), "is not open"),
        (events.LeaseExpired(AT, digest("unknown")), "is not open"),
        (events.LeaseReleased(AT, SUBMITTED.digest), "is not open"),
        (events.LeaseOverdue(AT, SUBMITTED.digest), "is not open"),
        (events.SubmissionReceived(AT, JUDGED.digest, digest("again"), 1), "is not open"),
        (events.SubmissionDeferred(AT, SUBMITTED.digest, HIS, END + 1.0), "is not open"),
        (deferred(END, "his", END + 1.0), "another submission is deferred"),
        (deferred(END - 1.0, "his", END - 1.0), "extends no lease"),
        (deferred(AT, "his", AT + LONGEST_DEFERRAL_S + 1.0), "a deferral without end"),
        (verdict_on(JUDGED.digest, submission_of(JUDGED)), "is not submitted"),
        (verdict_on(SUBMITTED.digest, digest("other")), "a verdict on another submission"),
        (events.SubmissionSetAside(AT, JUDGED.digest, HIS, FAILED), "is not submitted"),
        (events.SubmissionSetAside(AT, SUBMITTED.digest, HIS[::-1], FAILED), "another submission"),
        (events.SubmissionSetAside(AT, SUBMITTED.digest, HIS, ()), "nobody failed at"),
        (closed(1), "steps close in order"),
        (closed(0, 2), "cannot be trained"),
        (closed(0, 0, 0), "cannot be trained"),
        (events.OuterResult(AT, 0, "a", digest("d")), "a run with one learner"),
        (events.RolledBack(AT, 1), "a rollback to what was not trained"),
        (events.RolledBack(AT, -1), "a rollback to what was not trained"),
    ],
)
def test_an_event_that_cannot_follow_is_refused(event: events.Event, words: str) -> None:
    with pytest.raises(IllegalTransition, match=words):
        apply(RUN.state, event)


def test_what_was_done_once_is_not_done_again() -> None:
    # given a lease that is overdue, and deferred beyond its own end
    state = apply(RUN.state, events.LeaseOverdue(AT, OPEN.digest))
    state = apply(state, deferred(AT, "his", END + 1.0))
    # then neither happens again, and its time goes on for that submission alone
    with pytest.raises(IllegalTransition, match="overdue twice"):
        apply(state, events.LeaseOverdue(AT, OPEN.digest))
    with pytest.raises(IllegalTransition, match="another submission is deferred"):
        apply(state, deferred(END, "another", END + 9.0))
    with pytest.raises(IllegalTransition, match="extends no lease"):
        apply(state, deferred(END, "his", END + 1.0))
    with pytest.raises(IllegalTransition, match="extends no lease"):
        apply(state, deferred(END + 1.0, "his", END + 9.0))
    apply(state, deferred(END, "his", END + LONGEST_DEFERRAL_S))
    # and no lease is deferred whose groups no step may train any more
    state = apply(apply(state, closed(0, 0, 1)), events.NonceDrawn(AT, 1, digest("n"), 3))
    with pytest.raises(IllegalTransition, match="a deferral beyond the lag"):
        apply(state, deferred(AT, "his", END + 9.0))


# -- What counts ---------------------------------------------------------------------------------


def test_a_steps_tally_counts_what_became_of_each_group() -> None:
    run = started(groups=40, max_groups=400)
    graded, rejected = run.lease("x"), run.lease("y")
    run.now += 4.0
    run.submit(graded), run.submit(rejected)
    run.judge(graded, ["usable", "filtered"])
    run.judge(rejected, None, reason="logprobs: " + "x" * 400)
    run.judge(run.submitted("x"), ["usable", "dropped"], fault="p7: KeyError")
    run.set_aside(aside := run.submitted("x"))
    run.release(run.lease("x"))
    assert run.lease("x") is not None
    run.now += 30.0
    assert run.advance() == []

    grades = [(g.group, g.outcome) for g in run.state.tallies[0].grades]
    assert grades == [(0, "usable"), (1, "filtered"), (0, "usable"), (1, "dropped")]
    assert replace(run.state.tallies[0], grades=()) == Tally(
        leased_groups=12,
        expired_groups=2,
        set_aside_groups=2,
        rejected_submissions=1,
        rejected_rollouts=4,
        last_rejection=("logprobs: " + "x" * 400)[:300],
    )
    assert run.state.steps[0].leased == 10  # not what was given back
    assert (run.state.dropped_groups, run.state.last_fault) == (1, "p7: KeyError")
    assert run.state.leases[aside.digest].attempts == FAILED
    worker = run.state.workers[key("x")]
    assert (worker.accepted_rollouts, worker.accepted_tokens, worker.served) == (6, 30, 1004.0)


def test_groups_are_struck_when_their_worker_is_doubted_or_no_step_may_train_them() -> None:
    run = started(groups=40, max_groups=400, async_level=0, min_groups=1)
    for name, recomputed in (("x", True), ("x", False), ("y", False)):
        run.judge(run.submitted(name), ["usable", "usable"], recomputed=recomputed)
    doubted, late = run.submitted("x"), run.lease("y")
    # when a worker is caught, then what was not recomputed is struck
    run.record(events.WorkerQuarantined(run.now, key("x"), "why"))
    assert run.state.tallies[0].expired_groups == 2 and run.state.leases.usable == {0: 4}
    # and so is what is accepted later without being recomputed
    run.judge(doubted, ["usable", "usable"], recomputed=False)
    assert run.state.tallies[0].expired_groups == 4 and run.state.leases.usable == {0: 4}
    # and a ban withdraws the lease too
    run.record(events.KeyBanned(run.now, key("y"), "why", BY_OPERATOR))
    assert run.state.leases[late.digest].status == "expired"
    assert run.state.tallies[0].expired_groups == 8 and run.state.leases.usable == {0: 2}
    # when the step closes without all groups, then the others lapse, and count in the next step
    first = next(iter(run.state.leases))
    run.record(events.StepClosed(run.now, 0, (events.TrainedGroup(first, 0),), "signed"))
    assert run.state.leases.usable == {}
    assert run.state.tallies == {1: Tally(expired_groups=1)}


def test_a_worker_is_as_fast_as_its_slowest_late_lease() -> None:
    run = started(groups=40, max_groups=400)
    first = run.lease("x")
    second = run.lease("x", holding=[first.digest])
    run.now += 10.0
    run.answer(first)
    assert run.state.workers[key("x")].pace == Pace(10.0, 5.0)
    # then the second counts from the answer to the first
    run.now += 5.0
    run.answer(second)
    pace = run.state.workers[key("x")].pace
    assert pace == Pace(0.8 * 10.0 + 0.2 * 5.0, 0.8 * 5.0 + 0.2 * 2.5)
    assert (pace.seconds(1), pace.seconds(4)) == (9.0, 18.0)
    assert run.state.leases[second.digest].took_s == 5.0
    # and a clock that is set back gives no negative time
    third = run.lease("x")
    run.now -= 60.0
    run.submit(third)
    assert run.state.leases[third.digest].took_s == 0.0


# -- Rollbacks -----------------------------------------------------------------------------------


def steps(first: int, last: int, nonce: str) -> list[events.Event]:
    drawn = [events.NonceDrawn(0.0, step, nonce, 1) for step in range(first, last)]
    closed = [events.StepClosed(1.0, step, (), "{}") for step in range(first, last)]
    return [event for pair in zip(drawn, closed, strict=True) for event in pair]


def test_after_a_rollback_steps_open_and_close_again_for_whoever_registers_anew() -> None:
    # given three closed steps, taken back to one
    decided: list[events.Event] = [
        events.WorkerRegistered(0.0, "old", "a"),
        events.VersionPublished(0.0, 3, "digest"),
        *steps(0, 3, "old"),
        events.KeyBanned(1.0, "old", "edited tokens", BY_OPERATOR),
        events.WorkerRegistered(1.0, "guest", "a", "invite"),
        events.InviteRevoked(1.0, "invite", "published", BY_OPERATOR),
    ]
    state = replay(POLICY, [*decided, events.RolledBack(2.0, 1)])
    assert (state.next_step, state.next_close, state.progress) == (1, 1, 2.0)
    # then what was decided of keys and invites stays
    assert set(state.bans) == {"old"} and set(state.revoked) == set(state.invited) == {"invite"}
    # and nobody is registered, and nothing published or leased
    assert not state.workers and not state.leases and state.newest is None
    # when the version and the steps come again
    for event in (
        events.VersionPublished(3.0, 1, "another digest"),
        events.WorkerRegistered(3.0, "new", "a"),
        *steps(1, 4, "new"),
    ):
        state = apply(state, event)
    assert state.finished
