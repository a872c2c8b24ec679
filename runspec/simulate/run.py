"""Simulates the run of a spec with a population."""

from __future__ import annotations

from runspec.core.errors import UserError
from runspec.core.models.config import ModelConfig
from runspec.core.spec.schema import RunSpec
from runspec.estimate.run import run_model, unknown_speeds
from runspec.estimate.timeline import Lengths
from runspec.estimate.version_size import version_size
from runspec.simulate.checking import Checks
from runspec.simulate.fleet import members, planned_swarm
from runspec.simulate.population import Swarm
from runspec.simulate.result import Result
from runspec.simulate.world import World
from verify.coordinator.machine.state import Policy

LONGEST_H = 1000.0
"""Hours that a run without `budget.max_hours` is simulated at most."""


def simulate(
    spec: RunSpec, config: ModelConfig | None, swarm: Swarm | None = None, *, seed: int = 0
) -> Result:
    """Simulates a run to its end, to a stall, or for `budget.max_hours` or `LONGEST_H`.

    Args:
        spec: of the run.
        config: the model's shape; None where nothing here knows it.
        swarm: the population; None: the replicas of the spec, honest and always there.
        seed: of all that is drawn; but lengths and filtered groups follow from the spec's seed.

    Raises:
        UserError: a speed is not known, or the population does not fit the spec.
    """
    unknown = list(unknown_speeds(spec, config))
    if unknown or config is None:
        raise UserError(
            f"the time of a step is not known without {', '.join(unknown)}",
            place="simulate",
            remedy="say it in the spec; `runspec plan` shows what an estimate rests on",
        )
    swarm = swarm or planned_swarm(spec)
    size = version_size(spec, config)
    model = run_model(spec, config, size)
    share, validators = spec.verify.prefill_share, swarm.validators

    def recompute_s(lengths: Lengths) -> float:
        return model.check_s(lengths) / share if share else 0.0

    checks = Checks(
        count=model.validators if validators.count is None else validators.count,
        speed=validators.speed,
        recompute_s=recompute_s,
        request_s=swarm.request or 0.0,
        mean_life_s=validators.fails,
        restart_s=validators.restarts,
    )
    world = World(
        model,
        Policy.of(spec),
        members(swarm, spec, config, size, model, seed),
        checks,
        backlog=spec.verify.backlog.submissions,
        seed=seed,
        horizon_s=3600.0 * (spec.budget.max_hours or LONGEST_H),
    )
    return world.run()
