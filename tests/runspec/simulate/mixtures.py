"""Random mixtures of hostile keys, and what one does to a run of the laptop profile."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from random import Random
from typing import Any

from runspec.core.models.config import ModelConfig
from runspec.core.models.of_spec import model_config
from runspec.core.spec.load import SpecFiles
from runspec.core.spec.schema import RunSpec
from runspec.lint.check import check_spec
from runspec.simulate.population import Swarm
from runspec.simulate.result import Result
from runspec.simulate.run import simulate
from tests.runspec.core.spec.spec_files import SPECS

STEPS = 30
KNOWN = {"name": "own", "count": 1, "known": True}
STRANGERS = {"name": "strangers", "count": 2}
_KINDS = ("refuse", "rubbish", "wrong", "withhold", "delay", "alternate", "sleeper", "collude")
_MISDEEDS = ("withhold", "rubbish", "wrong", "refuse")


@dataclass(frozen=True)
class Outcome:
    """The effect of a mixture on a run."""

    factor: float
    """Time of all steps over that without hostile keys; of a run that stalls, of its steps."""
    stalled: bool
    wasted: float
    """Share of the honest rollouts."""


@cache
def laptop() -> tuple[RunSpec, ModelConfig]:
    """The laptop profile with a few steps, and its model's shape."""
    files = SpecFiles(SPECS / "target_short.yaml", "laptop", None, [f"steps={STEPS}"])
    spec = check_spec(files).require()
    config = model_config(spec)
    assert config is not None
    return spec, config


def mixture(dice: Random, most_keys: int) -> list[dict[str, Any]]:
    """Draws groups of hostile keys, together at most `most_keys`."""
    left = round(most_keys ** dice.random())
    groups: list[dict[str, Any]] = []
    while left > 0 and len(groups) < 4:
        count = dice.randint(1, left)
        left -= count
        strategy: dict[str, Any] = {"kind": dice.choice(_KINDS), "misdeed": dice.choice(_MISDEEDS)}
        strategy["of"] = dice.randint(2, 6)
        strategy["honest"] = dice.randint(1, strategy["of"] - 1)
        strategy["record"] = dice.randint(1, 5)
        group = {"name": f"hostile{len(groups)}", "count": count, "strategy": strategy}
        for key, times in (("arrives", (2, 10)), ("over", (2, 20)), ("stays", (5, 60))):
            if dice.random() < 0.4:
                group[key] = f"{dice.choice(times)}s"
        if "stays" in group:
            group["away"] = f"{dice.choice((1, 30))}s"
            group["crashes"] = dice.choice((0.0, 0.5, 1.0))
        if dice.random() < 0.3:
            group["poll"] = dice.choice(("50ms", "1s", "5s"))
        groups.append(group)
    return groups


def run(honest: dict[str, Any], hostile: list[dict[str, Any]], seed: int = 0) -> Result:
    """Simulates a run with honest and hostile workers."""
    spec, config = laptop()
    swarm = {"workers": [honest, *hostile], "request": "10ms"}
    return simulate(spec, config, Swarm.model_validate(swarm), seed=seed)


@cache
def _alone(name: str) -> float:
    return run(KNOWN if name == "own" else STRANGERS, []).seconds


def outcome(honest: dict[str, Any], hostile: list[dict[str, Any]]) -> Outcome:
    """Measures a mixture against the same run without it."""
    result = run(honest, hostile)
    factor = result.seconds / _alone(honest["name"])
    return Outcome(factor, result.ended == "stalled", result.wasted_share or 0.0)
