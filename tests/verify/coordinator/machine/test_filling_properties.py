"""The state machine, whatever happens: the invariants that every sequence of events keeps."""

from collections import Counter

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.verify.coordinator.filled import Filled, digest, key, policy
from verify.coordinator.machine import filling
from verify.coordinator.machine.events import (
    BY_OPERATOR,
    BanLifted,
    Event,
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
from verify.coordinator.machine.filling import Close
from verify.coordinator.machine.reputation import BAN_AFTER, CLEAR_AFTER, reputation
from verify.coordinator.machine.state import Rank
from verify.coordinator.machine.transitions import replay
from verify.formats.lease import MAX_OPEN_LEASES

OWN, STRANGERS = ["a", "b"], ["c", "d", "e"]
WORKERS = [*OWN, *STRANGERS]
OUTCOMES = ["usable", "usable", "usable", "filtered", "dropped"]
REASONS = ["logprobs: row 0: 0.2 > 0.1", "toploc: row 1: 40 > 38", "format: no rows"]
FLOOR, START = 0.2, 0.6


class Watched(Filled):
    """Looks at each lease and each batch beside the state that it was decided in."""

    def record(self, event: Event) -> None:
        before = self.state
        super().record(event)
        if isinstance(event, LeaseGranted):
            self.a_lease_is_within_the_bounds_of_its_rank(before, event.lease)
        elif isinstance(event, StepClosed):
            self.a_batch_is_in_lease_order_rank_by_rank(before, event)

    def a_lease_is_within_the_bounds_of_its_rank(self, before, lease):
        worker, rank = before.workers[lease.worker], before.workers[lease.worker].rank
        mine = [r for r in before.leases.values() if r.lease.worker == lease.worker]
        late = before.policy.async_level
        held = [r for r in mine if r.status == "open"]
        held += [r for r in mine if r.status == "submitted" and before.lag(r) <= late]
        if rank is Rank.NEW:
            assert (lease.groups, held) == (1, [])
            tried = filling.tried_groups(self.state, lease.step, self.now)
            assert tried <= before.policy.newcomer_groups
        else:
            assert worker.standing.quarantine is None
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
            self.run.register(name, own=name in OWN)
        before = self.run.state
        mine = [d for d, r in before.leases.items() if r.lease.worker == key(name)]
        found = self.run.lease(name, holding=mine if holds else ())
        assert found is None or key(name) not in before.bans

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
    def no_step_is_leased_beyond_its_bounds(self):
        policy = self.run.state.policy
        for number, step in self.run.state.steps.items():
            assert 0 <= step.leased <= policy.max_groups
            assert number - self.run.state.newest.version <= policy.async_level

    @invariant()
    def indices_have_no_holes_and_no_two_leases_share_a_seed(self):
        leases = list(self.leases().values())
        assert len({lease.seed for lease in leases}) == len(leases)
        indices: dict[tuple[str, int], list[int]] = {}
        for lease in leases:
            indices.setdefault((lease.worker, lease.step), []).append(lease.index)
        assert all(found == list(range(len(found))) for found in indices.values())

    @invariant()
    def a_worker_holds_only_so_many_leases(self):
        held = Counter(r.lease.worker for r in self.of("open") if r.expires > self.run.now)
        assert max(held.values(), default=0) <= MAX_OPEN_LEASES

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
        assert not undecided or self.ahead(filling.next_due(state, now))
        assert self.ahead(filling.next_overdue(state, state.workers, now))

    def ahead(self, due):
        return due is None or due > self.run.now

    @invariant()
    def a_banned_key_holds_no_lease(self):
        for record in self.run.state.leases.values():
            if record.lease.worker in self.run.state.bans:
                assert record.status != "open"

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
    def keys_without_work_are_counted_as_they_are(self):
        state = self.run.state
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

    def leases(self):
        return {e.digest: e.lease for e in self.run.events if isinstance(e, LeaseGranted)}


TestFilling = Filling.TestCase
TestFilling.settings = settings(
    max_examples=120,
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
