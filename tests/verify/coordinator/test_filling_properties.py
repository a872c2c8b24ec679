"""The state machine, whatever happens: the invariants that every sequence of events keeps."""

from collections import Counter

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.verify.coordinator.filled import Filled, digest, key, policy
from verify.coordinator import filling
from verify.coordinator.events import (
    BY_OPERATOR,
    BanLifted,
    FailedAttempt,
    KeyBanned,
    LeaseExpired,
    LeaseGranted,
    NonceDrawn,
    QuarantineEnded,
    StepClosed,
    SubmissionDeferred,
    SubmissionJudged,
    SubmissionSetAside,
    WorkerQuarantined,
    WorkerRegistered,
)
from verify.coordinator.filling import Close
from verify.coordinator.reputation import BAN_AFTER, CLEAR_AFTER, reputation
from verify.coordinator.transitions import replay

WORKERS = ["a", "b", "c", "d"]
OUTCOMES = ["usable", "usable", "usable", "filtered", "dropped"]
REASONS = ["logprobs: row 0: 0.2 > 0.1", "toploc: row 1: 40 > 38", "format: no rows"]
FLOOR, START = 0.2, 0.6


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
        self.run = Filled(
            policy(
                groups=groups,
                max_groups=max_groups * groups,
                min_groups=min(min_groups, groups),
                groups_per_submission={"a": per_submission},
                prefill_share=START,
                prefill_floor=FLOOR,
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
            self.run.register(name)
        before = self.run.state
        mine = [d for d, r in before.leases.items() if r.lease.worker == key(name)]
        found = self.run.lease(name, holding=mine if holds else ())
        assert found is None or key(name) not in before.bans
        if found is None or found.digest in before.leases:
            return
        if found.newcomer:
            self.newcomers_hold_no_more_than_they_may(before, found.lease.step)
        if before.workers[key(name)].standing.quarantine:  # it is leased one at a time
            recent = (before.leases[d] for d in mine)
            late = before.policy.async_level
            assert not any(r.outstanding for r in recent if before.lag(r) <= late)

    def newcomers_hold_no_more_than_they_may(self, before, step):
        """Once somebody's work was accepted who may still work; a share of all is no limit."""
        limited = before.policy.newcomer_groups < before.policy.groups
        named = (k for k, worker in before.workers.items() if not worker.standing.newcomer)
        if limited and any(name not in before.bans for name in named):
            held = sum(filling.newcomer_groups(self.run.state, step, self.run.now))
            assert held <= before.policy.newcomer_groups

    @rule(name=st.sampled_from(WORKERS), outcomes=st.lists(st.sampled_from(OUTCOMES), max_size=6))
    def work(self, name, outcomes):
        """One after the other, while there is something to lease."""
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
        """Too much waits for a verdict: a lease lasts longer for what was brought in time."""
        record, now = data.draw(st.sampled_from(self.of("open"))), self.run.now
        late = self.run.state.lag(record) > self.run.state.policy.async_level
        if now < record.expires < now + seconds and not late:
            brought = digest("s", record.digest)
            self.run.record(SubmissionDeferred(now, record.digest, brought, now + seconds))
            over = filling.expired_leases(self.run.state, now + seconds - 1.0)
            assert record.digest not in {each.digest for each in over}

    @precondition(lambda self: self.of("open"))
    @rule(data=st.data())
    def release(self, data):
        self.run.release(data.draw(st.sampled_from(self.of("open"))))

    @precondition(lambda self: self.of("submitted"))
    @rule(data=st.data(), accepted=st.sampled_from([True, True, True, False]))
    def judge(self, data, accepted):
        """Good work lowers the share that is recomputed, and a rejection raises it."""
        record = data.draw(st.sampled_from(self.of("submitted")))
        share = self.run.state.share_of(record.lease.worker)
        if accepted:
            size = record.lease.groups
            groups = st.lists(st.sampled_from(OUTCOMES), min_size=size, max_size=size)
            self.run.judge(record, data.draw(groups), recomputed=data.draw(st.booleans()))
            assert self.run.state.share_of(record.lease.worker) <= share
        else:
            self.run.judge(record, None, reason=data.draw(st.sampled_from(REASONS)))
            assert self.run.state.share_of(record.lease.worker) >= share

    @precondition(lambda self: self.of("submitted"))
    @rule(data=st.data())
    def set_aside(self, data):
        """Validators fail at a submission again and again: no credit and no rejection."""
        record = data.draw(st.sampled_from(self.of("submitted")))
        before = self.run.state.workers[record.lease.worker]
        failed = (FailedAttempt(self.run.now, key("validator"), "its process ended"),)
        self.run.record(
            SubmissionSetAside(self.run.now, record.digest, digest("s", record.digest), failed)
        )
        after = self.run.state.workers[record.lease.worker]
        assert after.accepted_tokens == before.accepted_tokens
        assert after.standing.rejected == before.standing.rejected

    @rule(name=st.sampled_from(WORKERS))
    def reject(self, name):
        """A worker samples badly again and again."""
        if key(name) in self.run.state.workers:
            for _ in range(BAN_AFTER):
                if record := self.run.lease(name):
                    self.run.answer(record, "rejected")

    @rule(name=st.sampled_from(WORKERS))
    def ban_or_pardon(self, name):
        if key(name) in self.run.state.bans:
            self.run.record(BanLifted(self.run.now, key(name), "an appeal", BY_OPERATOR))
        else:
            self.run.record(KeyBanned(self.run.now, key(name), "by hand", BY_OPERATOR))
            assert not [r for r in self.of("open") if r.lease.worker == key(name)]

    @rule(seconds=st.sampled_from([1.0, 10.0, 31.0, 101.0]))
    def wait(self, seconds):
        self.run.now += seconds
        self.advance()

    @rule(leases=st.integers(1, 3), late=st.sampled_from("ab"), prompt=st.sampled_from("cd"))
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

    @invariant()
    def no_group_is_trained_twice_and_none_beyond_the_lag(self):
        leases = self.leases()
        trained = [(g.lease, g.group) for c in self.closed for g in c.groups]
        assert len(trained) == len(set(trained))
        for closed in self.closed:
            for group in closed.groups:
                lag = closed.step - leases[group.lease].version
                assert 0 <= lag <= self.run.state.policy.async_level

    @invariant()
    def batches_are_in_lease_order_and_of_the_right_size(self):
        policy, order = self.run.state.policy, list(self.leases())
        for closed in self.closed:
            places = [(order.index(g.lease), g.group) for g in closed.groups]
            assert places == sorted(places)
            assert policy.min_groups <= len(closed.groups) <= policy.groups
            assert closed.complete == (len(closed.groups) == policy.groups)

    @invariant()
    def a_complete_batch_passed_over_no_undecided_lease(self):
        events = self.run.events
        for place, event in enumerate(events):
            if isinstance(event, StepClosed) and len(event.trained) == self.run.state.policy.groups:
                before = replay(self.run.state.policy, events[:place])
                if self.timed_out(before, event):
                    continue
                last = list(before.leases).index(event.trained[-1].lease)
                for record in list(before.leases.values())[:last]:
                    assert record.lease.step != event.step or not record.outstanding

    def timed_out(self, before, event):
        return event.at >= before.steps[event.step].since + before.policy.deadline_s

    @invariant()
    def no_step_is_leased_beyond_its_bounds(self):
        policy = self.run.state.policy
        for number, step in self.run.state.steps.items():
            assert 0 <= step.leased <= policy.max_groups
            assert 0 <= step.given_back <= policy.groups
            assert number - self.run.state.newest.version <= policy.async_level
            own = [r for r in self.run.state.leases.values() if r.lease.step == number]
            held = sum(r.lease.groups if r.outstanding else len(r.usable) for r in own)
            assert held <= policy.groups
            late = sum(len(r.usable) for r in self.late()) if number == self.next_close() else 0
            needed = filling.needed_groups(self.run.state, number)
            assert needed == max(0, policy.groups - held - late)

    @invariant()
    def indices_have_no_holes_and_no_two_leases_share_a_seed(self):
        leases = list(self.leases().values())
        assert len({lease.seed for lease in leases}) == len(leases)
        indices: dict[tuple[str, int], list[int]] = {}
        for lease in leases:
            indices.setdefault((lease.worker, lease.step), []).append(lease.index)
        assert all(found == list(range(len(found))) for found in indices.values())

    @invariant()
    def a_worker_ties_up_only_so_many_leases_whether_it_gives_them_back_or_not(self):
        tied_up = Counter(
            record.lease.worker
            for record in (*self.of("open"), *self.of("released"))
            if record.lease.expires > self.run.now
        )
        assert max(tied_up.values(), default=0) <= filling.MAX_OPEN_LEASES

    @invariant()
    def every_nonce_was_drawn_after_its_workers_key_was_known(self):
        known: set[str] = set()
        drawn_when_known: dict[str, set[str]] = {}
        for event in self.run.events:
            if isinstance(event, WorkerRegistered):
                known.add(event.worker)
            elif isinstance(event, NonceDrawn):
                drawn_when_known[event.nonce] = set(known)
            elif isinstance(event, LeaseGranted):
                assert event.lease.worker in drawn_when_known[event.lease.nonce]

    @invariant()
    def time_alone_is_announced(self):
        """If nothing can be decided now, `next_due` lies ahead; else the clock would never wake."""
        state, now = self.run.state, self.run.now
        undecided = not filling.expired_leases(state, now) and not filling.decide_close(state, now)
        due = filling.next_due(state)
        assert due is None or not undecided or due > now

    @invariant()
    def a_banned_key_holds_no_lease(self):
        for record in self.run.state.leases.values():
            if record.lease.worker in self.run.state.bans:
                assert record.status not in ("open", "released")

    @invariant()
    def nothing_trains_on_the_word_of_a_worker_in_doubt(self):
        for record in self.run.state.leases.values():
            worker = self.run.state.workers[record.lease.worker]
            if worker.standing.quarantine is not None or record.lease.worker in self.run.state.bans:
                assert record.recomputed or record.usable == ()

    @invariant()
    def shares_stay_above_the_floor_and_are_whole_in_quarantine(self):
        for name, worker in self.run.state.workers.items():
            share = self.run.state.share_of(name)
            doubted = worker.standing.quarantine is not None or name in self.run.state.bans
            assert 0.0 <= reputation(worker.standing) < 1.0
            assert share == 1.0 if doubted else FLOOR <= share <= START

    @invariant()
    def standings_are_counts_of_the_ledger(self):
        leases = {e.digest: e.lease for e in self.run.events if isinstance(e, LeaseGranted)}
        for name, worker in self.run.state.workers.items():
            judged = [e for e in self.run.events if isinstance(e, SubmissionJudged)]
            mine = [e.accepted for e in judged if leases[e.lease].worker == name]
            assert (worker.standing.accepted, worker.standing.rejected) == (
                sum(mine),
                len(mine) - sum(mine),
            )
            withheld = [e for e in self.run.events if isinstance(e, LeaseExpired)]
            assert worker.standing.withheld >= sum(leases[e.lease].worker == name for e in withheld)

    @invariant()
    def keys_with_a_name_and_keys_without_work_are_counted_as_they_are(self):
        state = self.run.state
        with_a_name = {name for name, w in state.workers.items() if not w.standing.newcomer}
        assert set(state.named) == with_a_name
        assert state.unproven == sum(worker.unproven for worker in state.workers.values())

    @invariant()
    def nobody_with_too_many_strikes_goes_on(self):
        for name, worker in self.run.state.workers.items():
            strikes = worker.standing.strikes
            assert strikes < BAN_AFTER or name in self.run.state.bans
            free = worker.standing.quarantine is None and name not in self.run.state.bans
            assert not free or worker.standing.in_a_row < CLEAR_AFTER or strikes == 0

    @invariant()
    def quarantines_begin_and_end_in_turn(self):
        """A pardon begins one too."""
        quarantined: set[str] = set()
        for event in self.run.events:
            if isinstance(event, WorkerQuarantined | BanLifted):
                quarantined.add(event.key if isinstance(event, BanLifted) else event.worker)
            elif isinstance(event, QuarantineEnded):
                assert event.worker in quarantined
                quarantined.remove(event.worker)

    def teardown(self):
        if hasattr(self, "run"):
            assert replay(self.run.state.policy, self.run.events) == self.run.state

    def next_close(self):
        return self.run.state.next_close

    def late(self):
        """Of closed steps."""
        return [r for r in self.run.state.leases.values() if r.lease.step < self.next_close()]

    def leases(self):
        return {e.digest: e.lease for e in self.run.events if isinstance(e, LeaseGranted)}


TestFilling = Filling.TestCase
TestFilling.settings = settings(
    max_examples=80,
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
