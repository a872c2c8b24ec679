"""Settings of the evaluator's engine, for the role and for what starts it."""

from __future__ import annotations

from runspec.core.spec.schema import RunSpec, SamplerPool


def evaluator_pool(spec: RunSpec) -> SamplerPool:
    """Return the settings of the evaluator's engine: those of its pool, on its own hardware."""
    own = spec.evaluator
    pool = next((p for p in spec.samplers if p.name == own.pool), spec.samplers[0])
    given = {"hardware": own.hardware, "parallel": own.parallel}
    changes = {name: value for name, value in given.items() if value is not None}
    # A version is loaded when nothing is sampled.
    return pool.model_copy(update={**changes, "in_flight_updates": False})
