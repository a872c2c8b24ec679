"""Schema of runspec/v1: frozen data classes; every field has its meaning and unit.

Roles read a resolved spec through these classes only. `runspec.core.spec.load` makes one resolved
spec from YAML layers.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from runspec.core.spec.fields import RESTART, SITE, Block, FloatType, Name, Steps
from runspec.core.spec.schema.learner import (
    Attention,
    Hardware,
    IslandMember,
    Islands,
    Learner,
    Lora,
    Mesh,
    Outer,
    Packing,
    Remat,
    ShareCodec,
)
from runspec.core.spec.schema.operations import (
    Budget,
    Checkpoints,
    Estimate,
    Identity,
    Kubernetes,
    Metrics,
    Monitor,
    Placement,
    Secret,
    SecretSource,
    Storage,
)
from runspec.core.spec.schema.samplers import (
    Backlog,
    Broadcast,
    CalibrationProfile,
    Evaluation,
    Evaluator,
    Origin,
    Parallel,
    Relay,
    SamplerPool,
    Sampling,
    Thresholds,
    Verify,
)
from runspec.core.spec.schema.training import (
    Advantage,
    Algorithm,
    AnyAlgorithm,
    Clip,
    Data,
    Fill,
    Filters,
    Grpo,
    HeldOut,
    Importance,
    Kl,
    Model,
    ModelShape,
    Optimizer,
    Pretrain,
    Reward,
    Sft,
    SolveRate,
    Source,
    Supervised,
    Tokenizer,
    WarmStart,
    ZLoss,
)

VERSION = "runspec/v1"
SUPERVISED = ("pretrain", "sft")
"""Kinds of `algorithm` that train on documents."""


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
    """Steps; step s trains policy version s into s + 1. It may only be raised."""
    model: Model
    """The policy."""
    warm_start: WarmStart | None = None
    """For `grpo`: supervised steps that make version 0 of a `model.shape`."""
    data: Data
    """Problems, or documents."""
    algorithm: AnyAlgorithm = Grpo()
    """What a step trains on, and by which loss."""
    optimizer: Optimizer
    """The update rule."""
    reward: list[Reward] = []
    """For `grpo`: terms, added up; merged by name over the layers."""
    learner: Learner
    """The process, or processes, that train."""
    samplers: list[SamplerPool] = []
    """For `grpo`: pools of workers, merged by name over the layers."""
    evaluations: list[Evaluation] = []
    """For `grpo`: what policy versions are evaluated on; merged by name over the layers."""
    evaluator: Evaluator = Evaluator()
    """For `grpo`: the process that evaluates, where there are evaluations."""
    monitors: Annotated[list[Monitor], SITE] = []
    """Tools that the run logs to; merged by name over the layers."""
    broadcast: Broadcast = Broadcast()
    """How policy versions travel."""
    verify: Verify = Verify()
    """For `grpo`: checks of what workers send."""
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

    @model_validator(mode="before")
    @classmethod
    def _without_validators(cls, value: Any) -> Any:
        """Let a run without workers have no validators by default."""
        verify = value.get("verify", {}) if isinstance(value, dict) else None
        if not isinstance(value, dict) or not isinstance(verify, dict):
            return value
        algorithm = value.get("algorithm")
        kind = algorithm.get("kind") if isinstance(algorithm, dict) else algorithm
        supervised = kind in SUPERVISED or isinstance(kind, Supervised)
        return value | {"verify": {"validators": 0, **verify}} if supervised else value

    @property
    def grpo(self) -> Grpo:
        """The algorithm of a run that samples; only what such a run reaches may ask for it."""
        assert isinstance(self.algorithm, Grpo), f"{self.algorithm.kind} has no samplers"
        return self.algorithm

    @property
    def supervised(self) -> Supervised | None:
        """The algorithm of a run that trains on documents; None for `grpo`."""
        return self.algorithm if isinstance(self.algorithm, Supervised) else None

    @property
    def holds_out(self) -> bool:
        """Whether a tenth of the problems is held out from training.

        A warm start shows by them whether it learns or memorises, and evaluations ask them.
        """
        trained = {source.name for source in self.data.sources if source.train}
        evaluated = any(each.source is None or each.source in trained for each in self.evaluations)
        return self.warm_start is not None or evaluated

    def publishes(self, version: int) -> bool:
        """Return whether the version after so many steps is published."""
        every = 1 if self.supervised is None else self.supervised.publish_every
        return version % every == 0 or version == self.steps


RunSpec.model_rebuild()
