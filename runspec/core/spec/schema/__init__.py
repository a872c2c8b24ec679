"""The schema of runspec/v1: plain frozen data, every field with its meaning and unit.

Roles read a resolved spec through these classes and through nothing else. How YAML layers become
one resolved spec is the business of `runspec.core.spec.load`.
"""

from runspec.core.spec.schema.algorithm import (
    Advantage,
    Algorithm,
    Clip,
    Fill,
    Filters,
    Importance,
    Kl,
    Optimizer,
)
from runspec.core.spec.schema.block import Block, FloatType
from runspec.core.spec.schema.learner import (
    Attention,
    Hardware,
    Learner,
    Lora,
    Mesh,
    Packing,
    Remat,
)
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
from runspec.core.spec.schema.run import VERSION, RunSpec
from runspec.core.spec.schema.samplers import (
    Backlog,
    Broadcast,
    CalibrationProfile,
    Origin,
    Parallel,
    Relay,
    SamplerPool,
    Sampling,
    Thresholds,
    Verify,
)
