"""Schema of the samplers, of their verification and evaluation, and of how versions travel."""

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
from runspec.core.spec.schema.learner import Hardware


class Parallel(Block):
    """How one replica divides the model."""

    CHANGE = "restart"

    tensor: Devices = 1
    """Devices that each hold a share of every layer."""
    data: Devices = 1
    """Copies of the model in one replica, each on `tensor` devices; they share its leases."""

    @property
    def devices(self) -> int:
        """Devices of one replica."""
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
    """Engine that generates."""
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
    """Bandwidth of its uplink, shared by all that fetch from it, for the estimate."""


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
    """Bandwidth of its uplink, shared by all that fetch from it, for the estimate."""


class Broadcast(Block):
    """How policy versions travel."""

    CHANGE = "restart"

    dtype: Annotated[FloatType, NEWRUN] = "bfloat16"
    """Type of the published weights: a policy version is these bits."""
    format: Annotated[Literal["full", "delta"], ROLLING, SITE] = "full"
    """Published form of a version: `full` has all elements, `delta` those that changed since the
    version before. A due anchor, or a delta that is not smaller, is published in full."""
    keep_versions: Annotated[Count, Unit("versions")] = 5
    """Newest versions that origin and relays keep."""
    anchor_every: Annotated[int, Field(gt=0, le=128), Unit("versions"), ROLLING, SITE] = 20
    """For format `delta`: versions from one full copy (anchor) to the next. The latest anchor and
    all deltas after it are kept for workers that join; a worker applies at most 256 deltas."""
    chunk_bytes: Annotated[Count, Unit("bytes"), NEWRUN] = 16 * 1024 * 1024
    """Size of an object; each is hashed by itself. A version in pieces of another size would be
    another version."""
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


class Evaluation(Block):
    """Problems that policy versions are asked and that nothing is trained on."""

    CHANGE = "restart"

    name: Name
    """Names the evaluation in results, curves and `runspec wait`."""
    source: Annotated[Name | None, NEWRUN] = None
    """Source of `data.sources`: all problems of one with `train: false`, else the tenth of it that
    the run holds out from training; null: the tenths of all that are trained on."""
    every: Annotated[Count, Unit("versions")] = 50
    """Versions whose number it divides are evaluated. Where the evaluator is late, it takes the
    newest of them and skips the others."""
    problems: Annotated[Count, Unit("problems")] | None = None
    """How many problems, the first of the source; null: all."""
    samples: Annotated[int, Field(gt=0, le=1024), Unit("answers")] = 4
    """Answers to each problem."""
    max_new_tokens: Tokens | None = None
    """Longest output; null: that of the evaluator's pool."""
    sampling: Sampling | None = None
    """How tokens are drawn; null: as the evaluator's pool does. The noise is always seeded."""
    grader: Name | None = None
    """Term of `reward` that grades all its problems; null: the one of each problem's type."""
    at_start: bool = True
    """Whether version 0 is evaluated."""
    at_end: bool = True
    """Whether the last version is evaluated; the end of the run waits for it."""


class Evaluator(Block):
    """The role that evaluates. It is trusted, and signs its results."""

    CHANGE = "restart"

    pool: Name | None = None
    """Pool of `samplers` with whose engine settings it samples; null: the first."""
    hardware: Annotated[Hardware | None, SITE] = None
    """Its accelerators; null: as one replica of the pool."""
    parallel: Annotated[Parallel | None, SITE] = None
    """How it divides the model; null: as one replica of the pool."""
    deadline: Duration = 1800.0
    """Longest time that a trained run waits for the evaluation of its last version."""
