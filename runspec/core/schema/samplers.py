"""Schema of the samplers, of their verification and evaluation, and of how versions travel."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from runspec.core.schema import fields
from runspec.core.schema.learner import Hardware


class Parallel(fields.Block):
    """How one replica divides the model."""

    CHANGE = "restart"

    tensor: fields.Devices = 1
    """Devices that each hold a share of every layer."""
    data: fields.Devices = 1
    """Copies of the model in one replica, each on `tensor` devices; they share its leases."""

    @property
    def devices(self) -> int:
        """Devices of one replica."""
        return self.tensor * self.data


class Sampling(fields.Block):
    """How tokens are drawn."""

    temperature: fields.Positive = 1.0
    """Logits are divided by it, in the sampler and in the loss."""
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Keeps the likeliest tokens up to this probability; 1 is off."""
    top_k: Annotated[int, Field(ge=-1), fields.Unit("tokens")] = -1
    """Keeps so many tokens; -1 is off."""
    seeded: bool = True
    """Gumbel noise from the lease, so that a validator can recompute which token had to come."""


class Accepts(fields.Block):
    """Devices with which a machine may join a pool, if the model fits there."""

    CHANGE = "restart"

    kinds: list[str] | None = None
    """Kinds of GPUs where `hardware` is one, named as `hardware.kind`; null: all."""
    memory: fields.Size | None = None
    """Least memory of one device."""


class SamplerPool(fields.Block):
    """Workers that are alike."""

    CHANGE = "restart"

    name: fields.Name
    """Names the pool; its workers are <name>-<i>."""
    engine: Literal["vllm"] = "vllm"
    """Engine that generates."""
    trust: Literal["trusted", "untrusted"] = "untrusted"
    """Whether its rollouts are believed without proof. A trusted pool takes no keys but the run's
    own and those with an invite that names it, whatever `verify.admission` says."""
    hardware: Annotated[Hardware, fields.SITE]
    """Accelerators of one replica, as the operator plans; workers may bring others (`accepts`)."""
    accepts: Annotated[Accepts, fields.SITE] = Accepts()
    """Devices with which a machine may join."""
    replicas: Annotated[fields.Processes, fields.SITE] = 1
    """Processes that the backend starts for this pool, and that the estimate counts on."""
    parallel: Annotated[Parallel, fields.SITE] = Parallel()
    """How one replica divides the model."""
    dtype: Annotated[fields.FloatType, fields.NEWRUN] = "bfloat16"
    """Type of weights and activations."""
    quantization: Annotated[Literal["fp8"] | None, fields.NEWRUN] = None
    """Weights quantised as the engine loads them; null is off."""
    enforce_eager: Annotated[bool | None, fields.SITE] = None
    """Whether the engine runs the model kernel by kernel, without compiling it into CUDA graphs;
    null: on CPUs it does, elsewhere it compiles, which costs minutes at a start."""
    max_model_len: fields.Tokens
    """Longest sequence, prompt included, that the engine makes room for."""
    max_new_tokens: Annotated[fields.Tokens, fields.NEWRUN]
    """Longest output, the end token included."""
    groups_per_submission: fields.Groups = 4
    """Groups of one lease."""
    relays: Annotated[list[str] | None, fields.SITE] = None
    """Relays that its workers fetch from, best first; null: all, in turn. The origin comes last."""
    download: Annotated[fields.Rate | None, fields.HOT, fields.SITE] = None
    """Link of one replica to its relay, for the estimate."""
    tokens_per_s: Annotated[
        fields.Positive | None, fields.Unit("output tokens/s of a replica"), fields.HOT, fields.SITE
    ] = None
    """Measured rate, for the estimate; null: computed from the hardware."""
    sampling: Sampling = Sampling()
    """How tokens are drawn."""
    in_flight_updates: Annotated[bool, fields.NEWRUN] = False
    """Whether a worker takes over a newer version in the middle of a rollout; each token's version
    is then recorded. Never in an untrusted pool, whose rollouts must be of one version."""


class Origin(fields.Block):
    """The publisher's server, from which every version starts."""

    CHANGE = "restart"

    url: str | None = None
    """Where it is reached. It listens at an http URL; an https URL is of a proxy before it, and the
    local backend chooses where it listens, as when null."""
    upload: Annotated[fields.Rate | None, fields.HOT] = None
    """Bandwidth of its uplink, shared by all that fetch from it, for the estimate."""


class Relay(fields.Block):
    """A server that fetches versions from its upstreams and serves them on."""

    CHANGE = "restart"

    name: fields.Name
    """Names the relay."""
    url: str | None = None
    """Where it is reached. It listens at an http URL; an https URL is of a proxy before it, and the
    local backend chooses where it listens, as when null."""
    upstream: list[str] = ["origin"]
    """Where it fetches from: `origin` or relays, best first."""
    download: Annotated[fields.Rate | None, fields.HOT] = None
    """Link from its upstream, for the estimate."""
    upload: Annotated[fields.Rate | None, fields.HOT] = None
    """Bandwidth of its uplink, shared by all that fetch from it, for the estimate."""


class Broadcast(fields.Block):
    """How policy versions travel."""

    CHANGE = "restart"

    dtype: Annotated[fields.FloatType, fields.NEWRUN] = "bfloat16"
    """Type of the published weights: a policy version is these bits."""
    format: Annotated[Literal["full", "delta"], fields.ROLLING, fields.SITE] = "full"
    """Published form of a version: `full` has all elements, `delta` those that changed since the
    version before. A due anchor, or a delta that is not smaller, is published in full."""
    keep_versions: Annotated[fields.Count, fields.Unit("versions")] = 5
    """Newest versions that origin and relays keep."""
    anchor_every: Annotated[
        int, Field(gt=0, le=128), fields.Unit("versions"), fields.ROLLING, fields.SITE
    ] = 20
    """For format `delta`: versions from one full copy (anchor) to the next. The latest anchor and
    all deltas after it are kept for workers that join; a worker applies at most 256 deltas."""
    chunk_bytes: Annotated[fields.Count, fields.Unit("bytes"), fields.NEWRUN] = 16 * 1024 * 1024
    """Size of an object; each is hashed by itself. A version in pieces of another size would be
    another version."""
    origin: Annotated[Origin, fields.SITE] = Origin()
    """The publisher's server."""
    relays: Annotated[list[Relay], fields.SITE] = []
    """Servers between origin and workers; merged by name."""
    volunteers: Literal["none", "public", "any"] = "none"
    """Relays of strangers (`runspec relay`) that may serve chunks to workers: none, those at public
    addresses, or those at private addresses too, for one campus."""


class Thresholds(fields.Block):
    """Limits of the checks for samplers of one precision, over those that were calibrated here."""

    CHANGE = "rolling"

    name: Literal["float32", "bfloat16", "fp8"]
    """The precision: a pool's quantization, or its dtype."""
    logprob_submission: fields.Nats
    """Mean |claimed - recomputed| log-prob over a submission."""
    logprob_rollout: fields.Nats
    """The same over one rollout."""
    gap: fields.Nats
    """tau: how far below the recomputed maximum a seeded choice may lie."""
    gap_share: fields.Share
    """Share of a rollout's tokens that may exceed `gap`."""
    gap_max: fields.Nats
    """Largest gap of any token."""
    gap_mean: fields.Nats
    """Mean gap over a submission, beyond what one token at `gap` adds."""
    mismatch_share: fields.Share
    """TOPLOC: share of the k positions that may differ in exponent or sign."""
    mantissa_mean: Annotated[fields.NonNegative, fields.Unit("of 128")]
    """TOPLOC: mean mantissa error."""
    mantissa_median: Annotated[fields.NonNegative, fields.Unit("of 128")]
    """TOPLOC: median mantissa error."""


class CalibrationProfile(fields.Block):
    """Limits that were measured for a pool's sampler and its validators (`verify calibrate`)."""

    CHANGE = "rolling"

    name: fields.Name
    """Names the profile."""
    file: str | None = None
    """The signed file, on this machine; a relative path starts from the spec's folder."""
    document: str | None = None
    """Its contents. They are filled in when a run is applied, so that validators elsewhere have
    them and nobody can exchange them."""


class Backlog(fields.Block):
    """Limits of work without a verdict; at a limit the coordinator accepts and leases no more."""

    CHANGE = "rolling"

    submissions: Annotated[fields.Count, fields.Unit("submissions")] = 4096
    """Submissions that wait for a verdict or are being uploaded."""
    bytes: fields.Size = 64.0 * 1024**3
    """Size of these submissions."""
    disk_reserve: Annotated[fields.Size, fields.SITE] = 1.0 * 1024**3
    """Space kept free on the coordinator's disk, for verdicts and the ledger."""


class Verify(fields.Block):
    """Checks of what workers send."""

    CHANGE = "rolling"

    validators: Annotated[fields.ProcessesOrNone, fields.RESTART, fields.SITE] = 1
    """Processes that check submissions and grade them."""
    hardware: Annotated[Hardware | None, fields.SITE, fields.RESTART] = None
    """Accelerators of one validator, over which it divides the model. Null: those of the machine it
    is on; not where the learner has accelerators."""
    engine: Annotated[str, fields.SITE] = "jax"
    """Prefill engine: `jax`, `torch`, or another package's entry point of `runspec.prefill`."""
    admission: Literal["open", "invite"] = "open"
    """Keys that may work in untrusted pools: `open`, all; `invite`, those that come with an invite
    (`runspec invite`). The keys of the run's own workers, in its directory, need none."""
    prefill_share: fields.Share = 1.0
    """Share of a new worker's submissions whose log-probs, noise and proofs are recomputed."""
    prefill_floor: fields.Share | None = None
    """Least value of that share, for the best reputation; null: the share is constant. Everything
    of a worker in quarantine is recomputed."""
    newcomer_share: fields.Share = 0.5
    """Share of a step's groups that strangers without a record may be leased together, as trials
    that the step does not wait for; at least one group."""
    logprob_alarm: Annotated[fields.Nats | None, fields.RESTART] = None
    """Largest mean |sampler's - learner's| log-prob of a step, on the same tokens under the same
    version. Above it `status` and the learner's log raise an alarm. Null: the largest value of the
    run's pools, which is 0.001 in float32, 0.02 in bfloat16 and 0.15 in fp8."""
    lease_timeout: fields.Duration = 1800.0
    """Time from a lease to its submission; after it the lease counts as withheld. A silent worker's
    groups may be leased to others earlier."""
    tokens_per_s: Annotated[
        fields.Positive | None, fields.Unit("tokens/s of a validator"), fields.HOT, fields.SITE
    ] = None
    """Measured prefill rate, for the estimate; null: computed from the hardware."""
    ledger: Annotated[fields.DatabaseUrl | None, fields.NEWRUN, fields.SITE] = None
    """PostgreSQL database that holds the coordinator's ledger, like postgresql://host/name; the
    password comes from PGPASSWORD or a pgpass file. null: state.db of the run directory."""
    backlog: Backlog = Backlog()
    """When workers are told to come again later."""
    proxies: Annotated[list[fields.AddressRange], fields.SITE] = []
    """Addresses of reverse proxies before the coordinator, like 10.0.0.7 or 10.0.0.0/24. Of these
    alone it believes `X-Forwarded-For`, by which it bounds the requests of each address; without
    them all that come through a proxy share the bounds of the proxy's."""
    crowd: Annotated[float, Field(ge=1.0, le=1000.0), fields.RESTART] = 1.0
    """By how much the limits of one address are multiplied, of requests and of new keys, where many
    workers share one (docs/public-runs.md)."""
    profiles: list[CalibrationProfile] = []
    """Signed profiles of calibrated limits, each for a pool's engine and precision and for devices
    of a worker; pairs that none covers have the published limits; merged by name."""
    loosest: Annotated[float, Field(ge=1.0)] = 1.0
    """How many times the published limit a limit of a profile may be. A worker names its devices
    itself, so the loosest profile is the one that all attackers choose."""
    uncalibrated: Literal["discard", "train"] = "discard"
    """What becomes of accepted work of devices that no profile covers, where there are profiles.
    `discard`: such workers are on probation, in small trials that are recomputed and not trained
    on. The devices of a pool's `hardware` are never on probation."""
    thresholds: list[Thresholds] = []
    """Limits for precisions that were not calibrated here, over any profile; merged by name."""

    @property
    def lowest_prefill_share(self) -> float:
        """The share of a worker with the best reputation."""
        return self.prefill_share if self.prefill_floor is None else self.prefill_floor


class Evaluation(fields.Block):
    """Problems that policy versions are asked and that nothing is trained on."""

    CHANGE = "restart"

    name: fields.Name
    """Names the evaluation in results, curves and `runspec wait`."""
    source: Annotated[fields.Name | None, fields.NEWRUN] = None
    """Source of `data.sources`: all problems of one with `train: false`, else the tenth of it that
    the run holds out from training; null: the tenths of all that are trained on."""
    every: Annotated[fields.Count, fields.Unit("versions")] = 50
    """Versions whose number it divides are evaluated. Where the evaluator is late, it takes the
    newest of them and skips the others."""
    problems: Annotated[fields.Count, fields.Unit("problems")] | None = None
    """How many problems, the first of the source; null: all."""
    samples: Annotated[int, Field(gt=0, le=1024), fields.Unit("answers")] = 4
    """Answers to each problem."""
    max_new_tokens: fields.Tokens | None = None
    """Longest output; null: that of the evaluator's pool."""
    sampling: Sampling | None = None
    """How tokens are drawn; null: as the evaluator's pool does. The noise is always seeded."""
    grader: fields.Name | None = None
    """Term of `reward` that grades all its problems; null: the one of each problem's type."""
    at_start: bool = True
    """Whether version 0 is evaluated."""
    at_end: bool = True
    """Whether the last version is evaluated; the end of the run waits for it."""


class Evaluator(fields.Block):
    """The role that evaluates. It is trusted, and signs its results."""

    CHANGE = "restart"

    pool: fields.Name | None = None
    """Pool of `samplers` with whose engine settings it samples; null: the first."""
    hardware: Annotated[Hardware | None, fields.SITE] = None
    """Its accelerators; null: as one replica of the pool."""
    parallel: Annotated[Parallel | None, fields.SITE] = None
    """How it divides the model; null: as one replica of the pool."""
    deadline: fields.Duration = 1800.0
    """Longest time that a trained run waits for the evaluation of its last version."""
