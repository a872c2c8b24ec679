"""Checks of what workers send, their limits, and the validators that make them."""

from __future__ import annotations

from typing import Annotated, Literal

from runspec.core.spec.fields import (
    HOT,
    NEWRUN,
    RESTART,
    SITE,
    AddressRange,
    Block,
    Count,
    DatabaseUrl,
    Duration,
    Name,
    Nats,
    NonNegative,
    Positive,
    ProcessesOrNone,
    Share,
    Size,
    Unit,
)
from runspec.core.spec.schema.learner import Hardware


class Thresholds(Block):
    """Limits of the checks for samplers of one precision, over those that were calibrated here."""

    CHANGE = "rolling"

    name: Literal["float32", "bfloat16", "fp8"]
    """The precision: a pool's quantization, or its dtype."""
    logprob_submission: Nats
    """Mean |claimed - recomputed| log-prob over a submission."""
    logprob_rollout: Nats
    """The same over one rollout."""
    gap: Nats
    """tau: how far below the recomputed maximum a seeded choice may lie."""
    gap_share: Share
    """Share of a rollout's tokens that may exceed `gap`."""
    gap_max: Nats
    """Largest gap of any token."""
    gap_mean: Nats
    """Mean gap over a submission, beyond what one token at `gap` adds."""
    mismatch_share: Share
    """TOPLOC: share of the k positions that may differ in exponent or sign."""
    mantissa_mean: Annotated[NonNegative, Unit("of 128")]
    """TOPLOC: mean mantissa error."""
    mantissa_median: Annotated[NonNegative, Unit("of 128")]
    """TOPLOC: median mantissa error."""


class CalibrationProfile(Block):
    """Limits that were measured for a pool's sampler and its validators (`verify calibrate`)."""

    CHANGE = "rolling"

    name: Name
    """Names the profile."""
    file: str | None = None
    """The signed file, on this machine; a relative path starts from the spec's folder."""
    document: str | None = None
    """Its contents. They are filled in when a run is applied, so that validators elsewhere have
    them and nobody can exchange them."""


class Backlog(Block):
    """Limits of work without a verdict; at a limit the coordinator accepts and leases no more."""

    CHANGE = "rolling"

    submissions: Annotated[Count, Unit("submissions")] = 4096
    """Submissions that wait for a verdict or are being uploaded."""
    bytes: Size = 64.0 * 1024**3
    """Size of these submissions."""
    disk_reserve: Annotated[Size, SITE] = 1.0 * 1024**3
    """Space kept free on the coordinator's disk, for verdicts and the ledger."""


class Verify(Block):
    """Checks of what workers send."""

    CHANGE = "rolling"

    validators: Annotated[ProcessesOrNone, RESTART, SITE] = 1
    """Processes that check submissions and grade them."""
    hardware: Annotated[Hardware | None, SITE, RESTART] = None
    """Accelerators of one validator, over which it divides the model. Null: those of the machine it
    is on; not where the learner has accelerators."""
    engine: Annotated[str, SITE] = "jax"
    """Prefill engine: `jax`, `torch`, or another package's entry point of `runspec.prefill`."""
    admission: Literal["open", "invite"] = "open"
    """Keys that may work in untrusted pools: `open`, all; `invite`, those that come with an invite
    (`runspec invite`). The keys of the run's own workers, in its directory, need none."""
    prefill_share: Share = 1.0
    """Share of a new worker's submissions whose log-probs, noise and proofs are recomputed."""
    prefill_floor: Share | None = None
    """Least value of that share, for the best reputation; null: the share is constant. Everything
    of a worker in quarantine is recomputed."""
    newcomer_share: Share = 0.5
    """Share of a step's groups that strangers without a record may be leased together, as trials
    that the step does not wait for; at least one group."""
    logprob_alarm: Annotated[Nats | None, RESTART] = None
    """Largest mean |sampler's - learner's| log-prob of a step, on the same tokens under the same
    version. Above it `status` and the learner's log raise an alarm. Null: the largest value of the
    run's pools, which is 0.001 in float32, 0.02 in bfloat16 and 0.15 in fp8."""
    lease_timeout: Duration = 1800.0
    """Time from a lease to its submission; after it the lease counts as withheld. A silent worker's
    groups may be leased to others earlier."""
    tokens_per_s: Annotated[Positive | None, Unit("tokens/s of a validator"), HOT, SITE] = None
    """Measured prefill rate, for the estimate; null: computed from the hardware."""
    ledger: Annotated[DatabaseUrl | None, NEWRUN, SITE] = None
    """PostgreSQL database that holds the coordinator's ledger, like postgresql://host/name; the
    password comes from PGPASSWORD or a pgpass file. null: state.db of the run directory."""
    backlog: Backlog = Backlog()
    """When workers are told to come again later."""
    proxies: Annotated[list[AddressRange], SITE] = []
    """Addresses of reverse proxies before the coordinator, like 10.0.0.7 or 10.0.0.0/24. Of these
    alone it believes `X-Forwarded-For`, by which it bounds the requests of each address; without
    them all that come through a proxy share the bounds of the proxy's."""
    profiles: list[CalibrationProfile] = []
    """Signed profiles of calibrated limits, each for the pools of its engine, precision and
    hardware; pools that none covers have the published limits; merged by name."""
    thresholds: list[Thresholds] = []
    """Limits for precisions that were not calibrated here, over any profile; merged by name."""

    @property
    def lowest_prefill_share(self) -> float:
        """The share of a worker with the best reputation."""
        return self.prefill_share if self.prefill_floor is None else self.prefill_floor
