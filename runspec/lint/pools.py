"""What several rules ask of sampler pools."""

from __future__ import annotations

from runspec.core.spec.schema import RunSpec, SamplerPool


def untrusted_pools(spec: RunSpec) -> list[SamplerPool]:
    """Pools whose rollouts are believed only once they are checked."""
    return [pool for pool in spec.samplers if pool.trust == "untrusted"]


def is_elsewhere(pool: SamplerPool, spec: RunSpec) -> bool:
    """Whether a pool's workers are to be thought of as on other people's machines.

    With `placement.roles` those that are not started here; without it those on accelerators, which
    an untrusted pool seldom has in the machine of whoever applies the spec.
    """
    if spec.placement.roles is not None:
        return pool.name not in spec.placement.roles
    return pool.hardware.kind != "cpu"
