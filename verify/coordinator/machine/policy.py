"""The parts of the spec that the state machine needs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from runspec.core.spec.schema import RunSpec


@dataclass(frozen=True)
class Policy:
    """How steps fill, and how far workers are trusted; durations in seconds."""

    run: str
    """Its name, which leases carry."""
    steps: int
    groups: int
    """Groups a step asks for (`prompts_per_step`)."""
    group_size: int
    async_level: int
    zero_variance_filter: bool
    max_groups: int
    """Groups of a step that known workers are leased at most."""
    min_groups: int
    """Fewer than these are no batch."""
    deadline_s: float
    lease_timeout_s: float
    groups_per_submission: Mapping[str, int]
    """For each pool."""
    prefill_share: float
    """Share of a new key's submissions to recompute."""
    prefill_floor: float
    """The share with the best reputation."""
    newcomer_groups: int
    """Groups of a step that new workers may hold together."""

    @classmethod
    def of(cls, spec: RunSpec) -> Policy:
        algorithm, fill = spec.algorithm, spec.algorithm.fill
        groups = algorithm.prompts_per_step
        return cls(
            run=spec.name,
            steps=spec.steps,
            groups=groups,
            group_size=algorithm.group_size,
            async_level=algorithm.async_level,
            zero_variance_filter=algorithm.filters.zero_variance,
            max_groups=int(fill.max_groups * groups),
            min_groups=max(1, math.ceil(fill.min_share * groups - 1e-9)),
            deadline_s=fill.deadline,
            lease_timeout_s=spec.verify.lease_timeout,
            groups_per_submission={p.name: p.groups_per_submission for p in spec.samplers},
            prefill_share=spec.verify.prefill_share,
            prefill_floor=spec.verify.lowest_prefill_share,
            newcomer_groups=max(1, int(spec.verify.newcomer_share * groups + 1e-9)),
        )
