"""The facts of a run, in the order in which they became true: what the ledger stores.

Each is plain frozen data; `at` is seconds since the epoch. Nothing else is ever stored: the state
of a coordinator is the fold of its events (`state.apply`), so that a restart, and an audit, see
exactly what the process before saw.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from verify.formats.lease import Lease
from verify.thresholds import GapNoise


@dataclass(frozen=True)
class CoordinatorStarted:
    """The process started, or its clock jumped, as after a sleep of the machine. The deadlines of
    open steps, and the groups that they may lease, count from here."""

    at: float


@dataclass(frozen=True)
class WorkerRegistered:
    at: float
    worker: str
    """Public key."""
    pool: str
    invite: str | None = None
    """Public key of the invite by which it came."""
    own: bool = False
    """Whether it is one of the run's own workers."""


@dataclass(frozen=True)
class WorkerQuarantined:
    """All its work is recomputed and it holds one lease at most, until enough was accepted."""

    at: float
    worker: str
    reason: str


@dataclass(frozen=True)
class QuarantineEnded:
    at: float
    worker: str


BY_COORDINATOR: Literal["coordinator"] = "coordinator"
BY_OPERATOR: Literal["operator"] = "operator"


@dataclass(frozen=True)
class KeyBanned:
    """Requests of the key are refused, and its open leases are over."""

    at: float
    key: str
    """A worker's, or one that has not registered yet."""
    reason: str
    by: Literal["coordinator", "operator"]


@dataclass(frozen=True)
class BanLifted:
    """An appeal was granted: a worker goes on in quarantine."""

    at: float
    key: str
    reason: str
    by: Literal["operator"]


@dataclass(frozen=True)
class InviteRevoked:
    """No more keys may come with an invite; those that came stay."""

    at: float
    invite: str
    """Its public key."""
    reason: str
    by: Literal["operator"]


@dataclass(frozen=True)
class VersionPublished:
    """The publisher's latest.json named a new version."""

    at: float
    version: int
    manifest_digest: str


@dataclass(frozen=True)
class NonceDrawn:
    """Opens a step, or admits to an open step the keys registered since its last draw."""

    at: float
    step: int
    nonce: str
    workers: int
    """How many keys were registered when it was drawn: it covers those and no later one."""


@dataclass(frozen=True)
class LeaseGranted:
    at: float
    lease: Lease
    digest: str
    document: str
    """The signed bytes, which are UTF-8 text."""


@dataclass(frozen=True)
class LeaseOverdue:
    """Its worker was silent for so long that others are leased the groups. It may still answer."""

    at: float
    lease: str


@dataclass(frozen=True)
class LeaseExpired:
    """No submission came in time: withheld."""

    at: float
    lease: str


@dataclass(frozen=True)
class LeaseReleased:
    """Its holder leaves and says so: others may be leased the groups at once."""

    at: float
    lease: str


@dataclass(frozen=True)
class SubmissionDeferred:
    """Its holder brought a submission in time, but too much waits for a verdict: the lease lasts
    until `until`, past its own time for this submission alone."""

    at: float
    lease: str
    submission: str
    until: float


@dataclass(frozen=True)
class SubmissionReceived:
    """The files lie under their final names."""

    at: float
    lease: str
    submission: str
    bytes: int


@dataclass(frozen=True)
class GroupGrade:
    """Grade of one group; rewards are the validator's, means over the rollouts."""

    group: int
    outcome: Literal["usable", "filtered", "dropped"]
    """`filtered`: all task rewards equal; `dropped`: the grader failed, nobody is to blame."""
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


@dataclass(frozen=True)
class SubmissionJudged:
    """The verdict files lie under their final names."""

    at: float
    lease: str
    submission: str
    verdict: str
    validator: str
    accepted: bool
    reason: str
    groups: tuple[GroupGrade, ...]
    """Empty when rejected."""
    gap_excess: float | None = None
    """Excess of its gaps over what a worker's gaps may be in the long run, nats (`gap_history`);
    None where its validator rejected it, its pool was not calibrated, or nothing was recomputed."""
    gap_noise: GapNoise | None = None
    """The noise by which the excess was found, of the profile of that time."""
    fault: str = ""
    """The grader's error at the last of the dropped groups, by the validator."""


@dataclass(frozen=True)
class FailedAttempt:
    """A validator held a submission and came to no verdict on it."""

    at: float
    validator: str
    reason: str
    """Its process ended, its time ran out, or what it said itself."""


@dataclass(frozen=True)
class SubmissionSetAside:
    """Validators that judge others fail at this submission, so it is judged no more. Its groups are
    dropped; its worker or the validators may be at fault (`verify.coordinator.services.claims`)."""

    at: float
    lease: str
    submission: str
    attempts: tuple[FailedAttempt, ...]
    """All of them, in order."""


@dataclass(frozen=True)
class TrainedGroup:
    lease: str
    group: int


@dataclass(frozen=True)
class StepClosed:
    """The step's one batch manifest is signed."""

    at: float
    step: int
    trained: tuple[TrainedGroup, ...]
    """In training order."""
    document: str
    """The signed batch manifest."""


@dataclass(frozen=True)
class RolledBack:
    """The run was taken back to a policy version, with keys made anew: nothing that was registered,
    leased, submitted or signed before counts any more, but for the steps closed below it."""

    at: float
    version: int


Event = (
    CoordinatorStarted
    | WorkerRegistered
    | WorkerQuarantined
    | QuarantineEnded
    | KeyBanned
    | BanLifted
    | InviteRevoked
    | VersionPublished
    | NonceDrawn
    | LeaseGranted
    | LeaseOverdue
    | LeaseExpired
    | LeaseReleased
    | SubmissionDeferred
    | SubmissionReceived
    | SubmissionJudged
    | SubmissionSetAside
    | StepClosed
    | RolledBack
)
