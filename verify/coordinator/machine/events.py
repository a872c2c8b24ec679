"""The events of a run, in the order in which they happened: the contents of the ledger.

Events are plain frozen data. The ledger stores nothing else: the state of a coordinator is the fold
of its events (`transitions.apply`). So a restart and an audit see exactly what the process before
saw.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from verify.formats.batch import CommitRecord, ShareOffered
from verify.formats.lease import Lease
from verify.thresholds import GapNoise


class IllegalTransition(Exception):
    """Raised for an event that cannot follow: a faulty coordinator, or a changed ledger."""


@dataclass(frozen=True)
class Event:
    """Base of all events; its direct subclasses are the kinds that a ledger's rows may hold."""

    at: float
    """Seconds since the epoch."""


@dataclass(frozen=True)
class CoordinatorStarted(Event):
    """The process started, or its clock jumped, as after a sleep of the machine.

    The deadlines of open steps, and the groups that they may lease, count from here.
    """


@dataclass(frozen=True)
class WorkerRegistered(Event):
    worker: str
    """Public key."""
    pool: str
    invite: str | None = None
    """Public key of the invite by which it came."""
    own: bool = False
    """Whether it is one of the run's own workers."""
    devices: str = ""
    """See `Lease.devices`; a key keeps them."""


@dataclass(frozen=True)
class ProbationChanged(Event):
    """A profile that covers a worker's devices came, or went (`on`; see `verify.uncalibrated`)."""

    worker: str
    on: bool


@dataclass(frozen=True)
class WorkerQuarantined(Event):
    """All work of the worker is recomputed and it holds at most one lease, until enough work was
    accepted."""

    worker: str
    reason: str


@dataclass(frozen=True)
class QuarantineEnded(Event):
    worker: str


BY_COORDINATOR: Literal["coordinator"] = "coordinator"
BY_OPERATOR: Literal["operator"] = "operator"


@dataclass(frozen=True)
class KeyBanned(Event):
    """Requests of the key are refused, and its open leases end."""

    key: str
    """Key of a worker, or a key that has not registered yet."""
    reason: str
    by: Literal["coordinator", "operator"]


@dataclass(frozen=True)
class BanLifted(Event):
    """An appeal was granted. The worker may work again, in quarantine."""

    key: str
    reason: str
    by: Literal["operator"]


@dataclass(frozen=True)
class InviteRevoked(Event):
    """No more keys may register with an invite; keys that have registered stay."""

    invite: str
    """Public key of the invite."""
    reason: str
    by: Literal["operator"]


@dataclass(frozen=True)
class VersionPublished(Event):
    """The publisher's latest.json named a new version."""

    version: int
    manifest_digest: str


@dataclass(frozen=True)
class NonceDrawn(Event):
    """A nonce was drawn: for a new step, or for the keys registered since an open step's last."""

    step: int
    nonce: str
    workers: int
    """Number of registered keys at the draw: the nonce covers these keys and no later key."""


@dataclass(frozen=True)
class LeaseGranted(Event):
    lease: Lease
    digest: str
    document: str
    """The signed lease, UTF-8 text."""


@dataclass(frozen=True)
class LeaseOverdue(Event):
    """The lease's worker was silent for so long that others are leased its groups. The worker may
    still answer."""

    lease: str


@dataclass(frozen=True)
class LeaseExpired(Event):
    """No submission arrived in time; the lease counts as withheld."""

    lease: str


@dataclass(frozen=True)
class LeaseReleased(Event):
    """The holder gave the lease back: others may be leased the groups at once."""

    lease: str


@dataclass(frozen=True)
class SubmissionDeferred(Event):
    """A submission was refused because too many wait for a verdict.

    The lease lasts until `until`. After its own end it accepts this submission only.
    """

    lease: str
    submission: str
    until: float


@dataclass(frozen=True)
class SubmissionReceived(Event):
    """A submission was received; its files have their final names."""

    lease: str
    submission: str
    bytes: int


@dataclass(frozen=True)
class GroupGrade:
    """Grade of one group; rewards are means of the validator's rewards over the rollouts."""

    group: int
    outcome: Literal["usable", "filtered", "dropped"]
    """`filtered`: all rewards are equal; `dropped`: the grader failed."""
    rollouts: int
    tokens: int
    """Output tokens of all rollouts."""
    target: int | None
    task_reward: float
    reward: float
    length_error: float | None
    """Mean |target - length| in tokens."""
    logprob_diff: float | None
    """Mean |claimed - recomputed| log-prob; None where nothing was prefilled."""
    answered: int | None = None
    """Rollouts with an answer in the form that the run asks for; None: not recorded."""


@dataclass(frozen=True)
class SubmissionJudged(Event):
    """A verdict was received; its files have their final names."""

    lease: str
    submission: str
    verdict: str
    validator: str
    accepted: bool
    reason: str
    groups: tuple[GroupGrade, ...]
    """Empty when rejected."""
    gap_excess: float | None = None
    """Excess of the gaps over a worker's long-run budget, nats (`verdicts`); None if the
    validator rejected the submission, its pool was not calibrated, or nothing was recomputed."""
    gap_noise: GapNoise | None = None
    """Noise by which the excess was computed; it comes from the profile of that time."""
    fault: str = ""
    """The grader's error at the last dropped group, as the validator reported it."""


@dataclass(frozen=True)
class FailedAttempt:
    """A validator claimed a submission and gave no verdict on it."""

    at: float
    validator: str
    reason: str
    """Why: its process ended, its time ran out, or the error that it reported."""


@dataclass(frozen=True)
class SubmissionSetAside(Event):
    """Validators failed at a submission but judged others, so nobody judges it any more.

    Its groups are dropped. Its worker or the validators may be at fault
    (`verify.coordinator.machine.trust`).
    """

    lease: str
    submission: str
    attempts: tuple[FailedAttempt, ...]
    """All failed attempts, in order."""


@dataclass(frozen=True)
class TrainedGroup:
    lease: str
    group: int


@dataclass(frozen=True)
class StepClosed(Event):
    """A step closed: its one batch manifest is signed."""

    step: int
    trained: tuple[TrainedGroup, ...]
    """In training order."""
    document: str
    """The signed batch manifest."""


@dataclass(frozen=True)
class OfferReceived(Event):
    """A learner island offered its share of the next step to commit."""

    offer: ShareOffered
    document: str
    """The signed offer."""


@dataclass(frozen=True)
class IslandsCommitted(Event):
    """The shares that make the next version are settled: the step's one record is signed."""

    record: CommitRecord
    document: str
    """The signed record."""


@dataclass(frozen=True)
class ShareLost(Event):
    """An island cannot fetch a share that the newest record names: the step is open again."""

    step: int
    island: str
    """The owner of the share."""
    by: str
    """The island that cannot fetch it."""


@dataclass(frozen=True)
class OuterResult(Event):
    """An island was the first to report the outer state that follows from a step's record."""

    step: int
    island: str
    digest: str


@dataclass(frozen=True)
class RolledBack(Event):
    """The run went back to a policy version, and its keys were replaced.

    Registrations, leases, submissions and signatures from before are void; only the steps closed
    below the version stay, and what learner islands committed below it.
    """

    version: int
