"""Who generates rollouts, how versions reach them, and how their work is checked."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from runspec.core.spec.fields import (
    HOT,
    NEWRUN,
    RESTART,
    ROLLING,
    SITE,
    AddressRange,
    Block,
    Count,
    DatabaseUrl,
    Devices,
    Duration,
    FloatType,
    Groups,
    Name,
    Nats,
    NonNegative,
    Positive,
    Processes,
    ProcessesOrNone,
    Rate,
    Share,
    Size,
    Tokens,
    Unit,
)
from runspec.core.spec.schema.training import Hardware


class Parallel(Block):
    """How one replica divides the model."""

    CHANGE = "restart"

    tensor: Devices = 1
    """Devices that each hold a share of every layer."""
    data: Devices = 1
    """Copies of the model in one replica, each on `tensor` devices; they share its leases."""

    @property
    def devices(self) -> int:
        """Of one replica."""
        return self.tensor * self.data


class Sampling(Block):
    """How tokens are drawn."""

    temperature: Positive = 1.0
    """Logits are divided by it, in the sampler and in the loss."""
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Keeps the likeliest tokens up to this probability; 1 is off."""
    top_k: Annotated[int, Field(ge=-1), Unit("tokens")] = -1
    """Keeps so many tokens; -1 is off."""
    seeded: bool = True
    """Gumbel noise from the lease, so that a validator can recompute which token had to come."""


class SamplerPool(Block):
    """Workers that are alike."""

    CHANGE = "restart"

    name: Name
    """Names the pool; its workers are <name>-<i>."""
    engine: Literal["vllm"] = "vllm"
    """What generates."""
    trust: Literal["trusted", "untrusted"] = "untrusted"
    """Whether its rollouts are believed without proof. A trusted pool takes no keys but the run's
    own and those with an invite that names it, whatever `verify.admission` says."""
    hardware: Annotated[Hardware, SITE]
    """Accelerators of one replica."""
    replicas: Annotated[Processes, SITE] = 1
    """Processes that the backend starts for this pool, and that the estimate counts on."""
    parallel: Annotated[Parallel, SITE] = Parallel()
    """How one replica divides the model."""
    dtype: Annotated[FloatType, NEWRUN] = "bfloat16"
    """Type of weights and activations."""
    quantization: Annotated[Literal["fp8"] | None, NEWRUN] = None
    """Weights quantised as the engine loads them; null is off."""
    enforce_eager: Annotated[bool | None, SITE] = None
    """Whether the engine runs the model kernel by kernel, without compiling it into CUDA graphs;
    null: on CPUs it does, elsewhere it compiles, which costs minutes at a start."""
    max_model_len: Tokens
    """Longest sequence, prompt included, that the engine makes room for."""
    max_new_tokens: Annotated[Tokens, NEWRUN]
    """Longest output, the end token included."""
    groups_per_submission: Groups = 4
    """Groups of one lease."""
    relays: Annotated[list[str] | None, SITE] = None
    """Relays that its workers fetch from, best first; null: all, in turn. The origin comes last."""
    download: Annotated[Rate | None, HOT, SITE] = None
    """Link of one replica to its relay, for the estimate."""
    tokens_per_s: Annotated[Positive | None, Unit("output tokens/s of a replica"), HOT, SITE] = None
    """Measured rate, for the estimate; null: computed from the hardware."""
    sampling: Sampling = Sampling()
    """How tokens are drawn."""
    in_flight_updates: Annotated[bool, NEWRUN] = False
    """Whether a worker takes over a newer version in the middle of a rollout; each token's version
    is then recorded. Never in an untrusted pool, whose rollouts must be of one version."""


class Origin(Block):
    """The publisher's server, from which every version starts."""

    CHANGE = "restart"

    url: str | None = None
    """Where it is reached. It listens at an http URL; an https URL is of a proxy before it, and the
    local backend chooses where it listens, as when null."""
    upload: Annotated[Rate | None, HOT] = None
    """What it can send, to all together, for the estimate."""


class Relay(Block):
    """A server that fetches versions from its upstreams and serves them on."""

    CHANGE = "restart"

    name: Name
    """Names the relay."""
    url: str | None = None
    """Where it is reached. It listens at an http URL; an https URL is of a proxy before it, and the
    local backend chooses where it listens, as when null."""
    upstream: list[str] = ["origin"]
    """Where it fetches from: `origin` or relays, best first."""
    download: Annotated[Rate | None, HOT] = None
    """Link from its upstream, for the estimate."""
    upload: Annotated[Rate | None, HOT] = None
    """What it can send, to all together, for the estimate."""


class Broadcast(Block):
    """How policy versions travel."""

    CHANGE = "restart"

    dtype: Annotated[FloatType, NEWRUN] = "bfloat16"
    """Type of the published weights: a policy version is these bits."""
    format: Annotated[Literal["full", "delta"], ROLLING, SITE] = "full"
    """What is published of a version: `full`, all of it; `delta`, the elements that changed since
    the one before, and all of it where that is not smaller or an anchor is due."""
    keep_versions: Annotated[Count, Unit("versions")] = 5
    """Newest versions that origin and relays keep."""
    anchor_every: Annotated[int, Field(gt=0, le=128), Unit("versions"), ROLLING, SITE] = 20
    """Of format `delta`: versions from one full copy (anchor) to the next; the latest, and all
    deltas after it, are kept for those who join, and apply 256 at most."""
    chunk_bytes: Annotated[Count, Unit("bytes"), NEWRUN] = 16 * 1024 * 1024
    """Of an object; each is hashed by itself. A version that was published in other pieces would
    be another version."""
    origin: Annotated[Origin, SITE] = Origin()
    """The publisher's server."""
    relays: Annotated[list[Relay], SITE] = []
    """Servers between origin and workers; merged by name."""


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
    """What no token may exceed."""
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
    """What may wait for a verdict before the coordinator takes no more in and leases no more."""

    CHANGE = "rolling"

    submissions: Annotated[Count, Unit("submissions")] = 4096
    """Waiting for a verdict, or being uploaded."""
    bytes: Size = 64.0 * 1024**3
    """Of these."""
    disk_reserve: Annotated[Size, SITE] = 1.0 * 1024**3
    """Kept free on the coordinator's disk, for verdicts and the ledger."""


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
    """Whose keys may work in untrusted pools: everybody's, or those that come with an invite
    (`runspec invite`). The keys of the run's own workers, in its directory, need none."""
    prefill_share: Share = 1.0
    """Share of a new worker's submissions whose log-probs, noise and proofs are recomputed."""
    prefill_floor: Share | None = None
    """What that share falls to as a worker's reputation grows; null: it stays as it is. Of a
    worker in quarantine all is recomputed."""
    newcomer_share: Share = 0.5
    """Share of a step's groups that strangers without a record may be leased together, as trials
    that the step does not wait for; at least one group."""
    logprob_alarm: Annotated[Nats | None, RESTART] = None
    """Mean |sampler's - learner's| log-prob of a step, on the same tokens under the same version,
    above which `status` and the learner's log raise the alarm; null: 0.001 for pools in float32,
    0.02 in bfloat16, 0.15 in fp8, the largest of the run's."""
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
