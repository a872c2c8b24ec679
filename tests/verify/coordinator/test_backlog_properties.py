"""A backlog, whatever workers, validators and the clock do: bounded, and nothing is lost."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from runspec.core.spec.schema import Backlog as Limits
from tests.verify.coordinator.filled import Filled, digest, key, policy
from verify.coordinator import filling
from verify.coordinator.edge.backlog import GRACE_S, Backlog
from verify.coordinator.events import CoordinatorStarted, Event, SubmissionReceived
from verify.coordinator.intake import Refusal
from verify.coordinator.journal import Journal
from verify.coordinator.policy import Policy
from verify.coordinator.state import LeaseRecord
from verify.coordinator.transitions import replay
from verify.formats.submission import SubmissionEnvelope

WORKERS = ["a", "b", "c"]
MOST, MOST_BYTES = 3, 1000


class Journaled(Filled):
    """The same, recorded by the real journal."""

    def __init__(self, policy: Policy, folder: Path) -> None:
        self.now = 1000.0
        self._policy, self._folder = policy, folder
        self.journal = self.opened()
        super().__init__(policy)

    def opened(self) -> Journal:
        return Journal(self._folder, self._policy, clock=lambda: self.now)

    def start_again(self) -> None:
        self.journal.close()
        self.journal = self.opened()
        self.state = self.journal.state

    def record(self, event: Event) -> None:
        self.journal.record(event)
        self.state = self.journal.state


class Intake(RuleBasedStateMachine):
    """Workers bring what they sampled; who is told to come again does, in time or never."""

    @initialize(deadline_s=st.sampled_from([100.0, 1000.0]), async_level=st.integers(0, 2))
    def begin(self, deadline_s, async_level):
        self.folder = TemporaryDirectory(dir="/dev/shm")  # synced at each event
        self.run = Journaled(
            policy(
                steps=50,
                groups=8,
                max_groups=10_000,
                async_level=async_level,
                deadline_s=deadline_s,
                lease_timeout_s=40.0,
            ),
            Path(self.folder.name),
        )
        for name in WORKERS:
            self.run.register(name)
        self.run.publish(0)
        self.told: dict[str, tuple[float, int]] = {}
        """By lease, when its holder is to come again, and with how many bytes."""
        self.restarted()

    def restarted(self):
        limits = Limits.model_validate(
            {"submissions": MOST, "bytes": f"{MOST_BYTES}B", "disk_reserve": "500B"}
        )
        self.backlog = Backlog(
            self.run.journal, lambda: self.of("submitted"), limits, free_bytes=lambda _: 10_000
        )

    @rule()
    def restart(self):
        """A coordinator that is started again knows nothing of whom it told, but for the ledger."""
        self.run.start_again()
        self.restarted()

    @rule(name=st.sampled_from(WORKERS))
    def lease(self, name):
        """As `Leasing` does: nothing new while too much waits."""
        if self.backlog.full() is None:
            mine = [r.digest for r in self.of("open") if r.lease.worker == key(name)]
            self.run.lease(name, holding=mine)

    @precondition(lambda self: self.of("open"))
    @rule(data=st.data(), size=st.sampled_from([1, 400, 600, 5000]))
    def bring(self, data, size):
        record = data.draw(st.sampled_from(self.of("open")))
        self.hand_in(record, self.told.get(record.digest, (0.0, size))[1])

    @rule()
    def come_again(self):
        """Everybody who was told does so at that time, or a little late."""
        for lease, (at, size) in sorted(self.told.items(), key=lambda item: item[1]):
            record = self.run.state.leases.get(lease)
            if record is not None and record.status == "open" and self.may_last(record):
                self.pass_until(max(self.run.now, at + GRACE_S / 3))
                self.hand_in(self.run.state.leases[lease], size)

    def hand_in(self, record: LeaseRecord, size: int) -> None:
        if record.status != "open" or record.expires <= self.run.now:
            return
        held, held_bytes = len(self.of("submitted")), self.waiting_bytes()
        envelope = SubmissionEnvelope(
            *("run", record.lease.step, record.lease.worker, record.lease.index, record.digest),
            *(digest("s", record.digest), size),
        )
        try:
            with self.backlog.reserve(record, envelope, self.run.now):
                self.run.record(
                    SubmissionReceived(
                        self.run.now, record.digest, digest("s", record.digest), size
                    )
                )
        except Refusal as refusal:
            self.run.state = self.run.journal.state  # it may have deferred the lease
            assert refusal.status == 429 and 1 <= (refusal.retry_after_s or 0) <= 60
            assert held, "it is refused, and nothing waits"
            self.told[record.digest] = (self.run.now + (refusal.retry_after_s or 0), size)
            return
        assert held < MOST and (held == 0 or held_bytes + size <= MOST_BYTES)
        self.told.pop(record.digest, None)

    @precondition(lambda self: self.of("submitted"))
    @rule(count=st.integers(1, 3))
    def judge(self, count):
        for record in self.of("submitted")[:count]:
            self.run.judge(record, ["usable"] * record.lease.groups)
        self.advance()

    @rule(seconds=st.sampled_from([1.0, 5.0, 30.0, 90.0]))
    def wait(self, seconds):
        """Some who were told to come again are late by more than they may."""
        self.pass_until(self.run.now + seconds)
        late = [le for le, (at, _) in self.told.items() if self.run.now > at + GRACE_S / 3]
        for lease in late:
            del self.told[lease]

    def pass_until(self, moment: float) -> None:
        self.run.now = max(self.run.now, moment)
        self.advance()

    def advance(self):
        self.run.advance()
        newest = self.run.state.newest.version
        for version in range(newest + 1, self.run.state.next_close + 1):
            self.run.publish(version)

    def may_last(self, record: LeaseRecord) -> bool:
        """Whether deferrals may extend it: within its lag, and by `deadline_s` in all."""
        state = self.run.state
        end = record.lease.expires + state.policy.deadline_s
        near = max((at for at, _ in self.told.values()), default=0.0) + 2 * GRACE_S
        return state.lag(record) <= state.policy.async_level and max(self.run.now, near) < end

    def of(self, status):
        return [r for r in self.run.state.leases.values() if r.status == status]

    def waiting_bytes(self):
        history = self.run.journal.history
        return sum(history.bytes_of(record.digest) for record in self.of("submitted"))

    @invariant()
    def what_waits_is_bounded(self):
        if hasattr(self, "run"):
            held = self.of("submitted")
            assert len(held) <= MOST
            assert len(held) <= 1 or self.waiting_bytes() <= MOST_BYTES

    @invariant()
    def who_comes_again_in_time_has_not_lost_the_lease(self):
        if hasattr(self, "run"):
            for lease in self.told:
                record = self.run.state.leases.get(lease)
                if record is not None and self.may_last(record):
                    assert record.status != "expired"
                    assert record not in filling.expired_leases(self.run.state, self.run.now)

    def teardown(self):
        if hasattr(self, "run"):
            events = list(self.run.journal.ledger.events())
            assert isinstance(events[0], CoordinatorStarted)
            assert replay(self.run.state.policy, events) == self.run.state
            self.run.journal.close()
            self.folder.cleanup()


TestIntake = Intake.TestCase
TestIntake.settings = settings(
    max_examples=30,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
