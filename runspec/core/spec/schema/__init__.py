"""Schema of runspec/v1: frozen data classes; every field has its meaning and unit.

Roles read a resolved spec through these classes only. `runspec.core.spec.load` makes one resolved
spec from YAML layers.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from runspec.core.spec.fields import RESTART, SITE, Block, FloatType, Name, Steps
from runspec.core.spec.schema.model import (
    Data,
    Model,
    ModelShape,
    Reward,
    SolveRate,
    Source,
    Tokenizer,
    WarmStart,
)
from runspec.core.spec.schema.operations import (
    Budget,
    Checkpoints,
    Estimate,
    Identity,
    Kubernetes,
    Placement,
    Secret,
    SecretSource,
    Storage,
)
from runspec.core.spec.schema.samplers import (
    Broadcast,
    Origin,
    Parallel,
    Relay,
    SamplerPool,
    Sampling,
)
from runspec.core.spec.schema.training import (
    Advantage,
    Algorithm,
    Attention,
    Clip,
    Fill,
    Filters,
    Hardware,
    Importance,
    Kl,
    Learner,
    Lora,
    Mesh,
    Optimizer,
    Packing,
    Remat,
)
from runspec.core.spec.schema.verify import Backlog, CalibrationProfile, Thresholds, Verify

VERSION = "runspec/v1"


class RunSpec(Block):
    """Description of one run. See `docs/spec.md`."""

    version: Annotated[Literal["runspec/v1"], RESTART]
    """Version of the schema; there is one."""
    kind: Literal["Run"] = "Run"
    """`Run`; a file of kind `Placement` holds the part that is a site's."""
    name: Name
    """Names the run, its directory and its messages."""
    seed: Annotated[int, Field(ge=0, lt=2**63)]
    """Every draw follows from it."""
    steps: Annotated[Steps, RESTART]
    """Rollout steps; step s trains policy version s into s + 1. It may only be raised."""
    model: Model
    """The policy."""
    warm_start: WarmStart | None = None
    """Supervised steps that make version 0 of a `model.shape`."""
    data: Data
    """Problems."""
    algorithm: Algorithm = Algorithm()
    """The policy-gradient step."""
    optimizer: Optimizer
    """The update rule."""
    reward: list[Reward] = Field(min_length=1)
    """Terms, added up; merged by name over the layers."""
    learner: Learner
    """The process, or processes, that train."""
    samplers: list[SamplerPool] = Field(min_length=1)
    """Pools of workers, merged by name over the layers."""
    broadcast: Broadcast = Broadcast()
    """How policy versions travel."""
    verify: Verify = Verify()
    """Checks of what workers send."""
    identity: Identity = Identity()
    """Root key that vouches for all signatures of the run."""
    checkpoints: Annotated[Checkpoints, SITE] = Checkpoints()
    """Full states of the learner."""
    storage: Annotated[Storage, SITE] = Storage()
    """Folders of runs."""
    placement: Annotated[Placement, SITE] = Placement()
    """Backend that starts the roles, and the machines they run on."""
    secrets: Annotated[list[Secret], SITE] = []
    """Environment variables of the roles; merged by name."""
    budget: Annotated[Budget, SITE] = Budget()
    """Limits of time and cost."""
    estimate: Annotated[Estimate, SITE] = Estimate()
    """Measured figures for `runspec plan`."""


RunSpec.model_rebuild()
