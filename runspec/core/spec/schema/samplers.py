"""Pools of samplers, and the broadcast of policy versions to them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from runspec.core.spec.fields import (
    HOT,
    NEWRUN,
    ROLLING,
    SITE,
    Block,
    Count,
    Devices,
    FloatType,
    Groups,
    Name,
    Positive,
    Processes,
    Rate,
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
