"""Events that cannot follow from the state."""

from dataclasses import replace

import pytest

from tests.verify.coordinator.filled import Filled, key, started
from verify.coordinator.events import (
    LeaseExpired,
    LeaseGranted,
    NonceDrawn,
    StepClosed,
    SubmissionReceived,
    TrainedGroup,
    VersionPublished,
    WorkerRegistered,
)
from verify.coordinator.transitions import IllegalTransition, apply


class TestIllegalTransitions:
    """What `apply` refuses, whoever asks for it."""

    def refuses(self, run: Filled, event: object) -> None:
        with pytest.raises(IllegalTransition):
            apply(run.state, event)  # type: ignore[arg-type]

    def test_workers_and_versions(self):
        run = started()
        self.refuses(run, WorkerRegistered(run.now, key("x"), "a"))
        self.refuses(run, VersionPublished(run.now, 0, key("m")))

    def test_nonces(self):
        run = started()
        run.lease("x")
        self.refuses(run, NonceDrawn(run.now, 0, key("n"), 2))  # admits nobody
        self.refuses(run, NonceDrawn(run.now, 2, key("n"), 2))  # step 1 is not open
        self.refuses(run, NonceDrawn(run.now, 1, key("n"), 1))  # leaves a key out

    def test_leases(self):
        run = started()
        run.lease("x")
        granted = next(e for e in run.events if isinstance(e, LeaseGranted))
        self.refuses(run, granted)
        for change in ({"index": 2}, {"nonce": key("other")}, {"step": 1}, {"worker": key("z")}):
            lease = replace(granted.lease, **change)
            self.refuses(run, LeaseGranted(run.now, lease, key("other"), ""))

    def test_submissions_expiries_and_closings(self):
        run = started()
        record = run.work("x")
        self.refuses(run, SubmissionReceived(run.now, record.digest, key("again"), 1))
        self.refuses(run, LeaseExpired(run.now, record.digest))
        self.refuses(run, StepClosed(run.now, 1, (), ""))
        self.refuses(run, StepClosed(run.now, 0, (TrainedGroup(record.digest, 2),), ""))
        twice = (TrainedGroup(record.digest, 0),) * 2
        self.refuses(run, StepClosed(run.now, 0, twice, ""))
