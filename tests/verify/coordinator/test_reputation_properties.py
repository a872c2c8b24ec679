"""Who may work: the invariants that every sequence of verdicts, bans and appeals keeps."""

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.verify.coordinator.filled import Filled, digest, key, policy
from verify.coordinator.events import (
    BY_OPERATOR,
    BanLifted,
    FailedAttempt,
    KeyBanned,
    LeaseExpired,
    LeaseGranted,
    QuarantineEnded,
    SubmissionJudged,
    SubmissionSetAside,
    WorkerQuarantined,
)
from verify.coordinator.reputation import BAN_AFTER, CLEAR_AFTER, reputation
from verify.coordinator.transitions import replay

WORKERS = ["a", "b", "c"]
REASONS = ["logprobs: row 0: 0.2 > 0.1", "toploc: row 1: 40 > 38", "format: no rows"]
FLOOR, START = 0.2, 0.6


class Discipline(RuleBasedStateMachine):
    """Workers sample well or badly, at times not at all; an operator bans and pardons."""

    @initialize()
    def begin(self):
        settings = {"groups": 12, "max_groups": 10_000, "steps": 100, "async_level": 3}
        self.run = Filled(policy(prefill_share=START, prefill_floor=FLOOR, **settings))
        for name in WORKERS:
            self.run.register(name)
        self.run.publish(0)

    @rule(name=st.sampled_from(WORKERS), holds=st.booleans())
    def lease(self, name, holds):
        """A grant to a worker in quarantine is its only work; a banned key gets none."""
        before = self.run.state
        mine = [r for r in before.leases.values() if r.lease.worker == key(name)]
        found = self.run.lease(name, holding=[r.digest for r in mine] if holds else ())
        if found is None:
            return
        assert key(name) not in before.bans
        if found.digest not in before.leases and before.workers[key(name)].standing.quarantine:
            recent = (r for r in mine if before.lag(r) <= before.policy.async_level)
            assert not any(r.outstanding for r in recent)

    @rule(name=st.sampled_from(WORKERS), data=st.data(), good=st.sampled_from([True, False]))
    def judge(self, name, data, good):
        mine = self.of(name, "open") or self.of(name, "submitted")
        if not mine:
            return
        record, share = mine[0], self.run.state.share_of(key(name))
        if record.status == "open":
            self.run.submit(record)
        if good:
            groups = ["usable"] * record.lease.groups
            self.run.judge(record, groups, recomputed=data.draw(st.booleans()))
            assert self.run.state.share_of(key(name)) <= share
        else:
            self.run.judge(record, None, reason=data.draw(st.sampled_from(REASONS)))
            assert self.run.state.share_of(key(name)) >= share

    @rule(name=st.sampled_from(WORKERS), count=st.integers(2, 8), good=st.booleans())
    def work(self, name, count, good):
        for _ in range(count):
            record = self.run.lease(name)
            if record is not None:
                self.run.answer(record, "usable" if good else "rejected")

    @rule(name=st.sampled_from(WORKERS))
    def set_aside(self, name):
        """Nobody comes to a verdict: no credit, no blame in the counts, a strike."""
        mine = self.of(name, "submitted")
        for record in mine[:1]:
            before = self.run.state.workers[key(name)]
            failed = (FailedAttempt(self.run.now, key("validator"), "its process ended"),)
            self.run.record(
                SubmissionSetAside(self.run.now, record.digest, digest("s", record.digest), failed)
            )
            after = self.run.state.workers[key(name)]
            assert after.accepted_tokens == before.accepted_tokens
            assert after.standing.rejected == before.standing.rejected

    @rule(name=st.sampled_from(WORKERS))
    def submit(self, name):
        for record in self.of(name, "open")[:1]:
            self.run.submit(record)

    @rule(name=st.sampled_from([*WORKERS, "stranger"]))
    def ban_or_pardon(self, name):
        if key(name) in self.run.state.bans:
            self.run.record(BanLifted(self.run.now, key(name), "an appeal", BY_OPERATOR))
        else:
            self.run.record(KeyBanned(self.run.now, key(name), "by hand", BY_OPERATOR))

    @rule(name=st.sampled_from(WORKERS))
    def release(self, name):
        for record in self.of(name, "open")[:1]:
            self.run.release(record)

    @rule(seconds=st.sampled_from([1.0, 31.0]))
    def wait(self, seconds):
        self.run.now += seconds
        self.run.advance()
        newest = self.run.state.newest.version
        for version in range(newest + 1, self.run.state.next_close + 1):
            self.run.publish(version)

    def of(self, name, status):
        leases = self.run.state.leases.values()
        return [r for r in leases if r.lease.worker == key(name) and r.status == status]

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
        for name in self.run.state.workers:
            turns = [
                type(e)
                for e in self.run.events
                if isinstance(e, WorkerQuarantined | QuarantineEnded) and e.worker == name
            ]
            ended = [i for i, kind in enumerate(turns) if kind is QuarantineEnded]
            assert all(i + 1 == len(turns) or turns[i + 1] is WorkerQuarantined for i in ended)

    def teardown(self):
        if hasattr(self, "run"):
            assert replay(self.run.state.policy, self.run.events) == self.run.state


TestDiscipline = Discipline.TestCase
TestDiscipline.settings = settings(
    max_examples=30,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
