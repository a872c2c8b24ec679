"""Random mixtures of hostile keys, honest populations, and what they do to a run of the laptop
profile."""

from dataclasses import dataclass
from functools import cache
from random import Random
from typing import Any

from runspec.core.models import ModelConfig
from runspec.core.models.family import model_config
from runspec.core.schema import RunSpec
from runspec.core.schema.load import SpecFiles
from runspec.lint.check import check_spec
from runspec.simulate.population import Swarm
from runspec.simulate.result import Result
from runspec.simulate.run import simulate
from tests.runspec.core.schema.spec_files import SPECS
from verify.coordinator.machine.state import Policy

Group = dict[str, Any]
"""Workers as a swarm file has them."""
_KINDS = ("refuse", "rubbish", "wrong", "withhold", "delay", "alternate", "sleeper", "collude")
_MISDEEDS = ("withhold", "rubbish", "wrong", "refuse")


@dataclass(frozen=True)
class Run:
    """A run that a mixture meets, and its honest workers."""

    known: int = 1
    strangers: int = 0
    speed: float = 1.0
    """Of the honest ones, over that of the profile."""
    async_level: int = 2
    groups: int = 16
    """Of a step."""
    lease: int = 8
    """Groups of a lease, at most."""
    checks: float = 1.0
    """Speed of the validators; 1: three times what one worker makes."""
    steps: int = 30

    @property
    def honest(self) -> list[Group]:
        own = {"name": "own", "count": self.known, "known": True, "speed": self.speed}
        strangers = {"name": "strangers", "count": self.strangers, "speed": self.speed}
        return [group for group in (own, strangers) if group["count"]]


KNOWN = Run()
STRANGERS = Run(known=0, strangers=2)


@dataclass(frozen=True)
class Outcome:
    """The effect of a mixture on a run."""

    factor: float
    """Time of all steps over that without hostile keys; of a run that stalls, of its steps."""
    stalled: bool
    wasted: float
    """Share of the honest rollouts."""
    key_s: float
    """Seconds beyond 1.5 times the undisturbed time, for each hostile key."""


@cache
def _spec(run: Run) -> tuple[RunSpec, ModelConfig]:
    changes = {
        "steps": run.steps,
        "algorithm.async_level": run.async_level,
        "algorithm.prompts_per_step": run.groups,
        "algorithm.updates_per_step": 1,
        "algorithm.old_logprobs": "sampler",
        "samplers.volunteers.groups_per_submission": run.lease,
    }
    sets = [f"{key}={value}" for key, value in changes.items()]
    files = SpecFiles(SPECS / "target_short.yaml", "laptop", None, sets)
    spec = check_spec(files).require()
    config = model_config(spec)
    assert config is not None
    return spec, config


def mixture(dice: Random, most_keys: int) -> list[Group]:
    """Draws groups of hostile keys, together at most `most_keys`."""
    left = round(most_keys ** dice.random())
    groups: list[Group] = []
    while left > 0 and len(groups) < 4:
        count = dice.randint(1, left)
        left -= count
        groups.append(hostile_group(dice, f"hostile{len(groups)}", count))
    return groups


def hostile_group(dice: Random, name: str, count: int) -> Group:
    """Draws what hostile keys do, and when they come and go."""
    strategy: Group = {"kind": dice.choice((*_KINDS, "late")), "misdeed": dice.choice(_MISDEEDS)}
    strategy["of"] = dice.randint(2, 6)
    strategy["honest"] = dice.randint(1, strategy["of"] - 1)
    strategy["record"] = dice.randint(1, 5)
    if strategy["kind"] in ("delay", "late") and dice.random() < 0.7:
        strategy["after"] = f"{round(10 ** dice.uniform(1.5, 3.7))}ms"
    group = {"name": name, "count": count, "strategy": strategy}
    for key, times in (("arrives", (2, 10)), ("over", (2, 20)), ("stays", (5, 60))):
        if dice.random() < 0.4:
            group[key] = f"{dice.choice(times)}s"
    if "stays" in group:
        group["away"] = f"{dice.choice((1, 30))}s"
        group["crashes"] = dice.choice((0.0, 0.5, 1.0))
    if dice.random() < 0.4:
        group["speed"] = dice.choice((0.25, 0.5, 2.0, 4.0))
    return group


def honest_population(dice: Random) -> list[Group]:
    """Draws honest workers of several speeds, some of which come and go; at times known ones."""
    groups: list[Group] = []
    for number in range(dice.randint(1, 3)):
        speed = dice.choice((0.5, 0.7, 1.0, 1.0, 1.5, 2.0))
        group: Group = {"name": f"honest{number}", "count": dice.randint(1, 6), "speed": speed}
        if dice.random() < 0.3:
            group["stays"], group["away"] = f"{dice.choice((20, 60))}s", "30s"
            group["crashes"] = dice.choice((0.0, 0.5))
        if dice.random() < 0.3:
            group["over"] = "10s"
        groups.append(group)
    steady = {"name": "steady", "count": dice.randint(1, 3), "known": dice.random() < 0.5}
    return [steady, *groups]


def simulated(run: Run, workers: list[Group]) -> Result:
    """Simulates a run with workers."""
    spec, config = _spec(run)
    swarm = {"workers": workers, "request": "10ms", "validators": {"speed": run.checks}}
    return simulate(spec, config, Swarm.model_validate(swarm))


@cache
def _alone_s(run: Run) -> float:
    return simulated(run, run.honest).seconds


def key_cost_s(run: Run) -> float:
    """`b` of the promise: how long a new key occupies one of the places for trials of a step, over
    the number of the places."""
    policy = Policy.of(_spec(run)[0])
    return policy.lease_timeout_s / policy.newcomer_groups


def outcome(run: Run, hostile: list[Group]) -> Outcome:
    """Measures a mixture against the same run without it."""
    result, alone = simulated(run, [*run.honest, *hostile]), _alone_s(run)
    keys = sum(group["count"] for group in hostile)
    return Outcome(
        factor=result.seconds / alone,
        stalled=result.ended == "stalled",
        wasted=result.wasted_share or 0.0,
        key_s=max(0.0, result.seconds - 1.5 * alone) / keys,
    )


def keys(count: int, kind: str, misdeed="withhold", record=1, *, after=None, **when) -> Group:
    strategy = {"kind": kind, "misdeed": misdeed, "record": record, "after": after}
    return {"count": count, "strategy": strategy, **when}


def strangers(count: int, speed: float, async_level: int = 2, *, lease: int = 8) -> Run:
    return Run(0, count, speed, async_level, lease=lease, steps=20)


CRASHING = {"stays": "60s", "away": "1s", "crashes": 0.5}
BRIEF = {"stays": "5s", "away": "1s", "crashes": 0.5}
HALF_HONEST = {"kind": "alternate", "misdeed": "withhold", "of": 6, "honest": 3}


def found(run: Run, *hostile: Group) -> tuple[Run, list[Group]]:
    return run, [{**group, "name": f"hostile{number}"} for number, group in enumerate(hostile)]


FOUND = [
    found(
        Run(lease=1, steps=20),
        keys(25, "sleeper", "wrong", 2, **CRASHING),
        keys(2, "late", "wrong", 2, after="61ms", over="2s"),
        keys(1, "collude", "withhold", 2, over="2s"),
        keys(1, "collude", "wrong", 1, **BRIEF, speed=2.0),
    ),
    found(
        strangers(2, 2.0, lease=1),
        keys(14, "wrong", stays="60s", away="30s", crashes=1.0, speed=2.0),
        keys(15, "rubbish", arrives="2s"),
        keys(1, "collude", "rubbish", 5, arrives="2s"),
    ),
    found(
        strangers(2, 0.5, 0, lease=1),
        keys(38, "rubbish", arrives="2s", **CRASHING),
        keys(10, "rubbish"),
        keys(3, "late", "rubbish", 1, after="2994ms", arrives="10s"),
    ),
    found(
        strangers(2, 0.25),
        keys(20, "wrong"),
        keys(1, "sleeper", "rubbish", 5, arrives="2s", speed=4.0),
        keys(1, "withhold", **BRIEF),
    ),
    found(
        strangers(4, 0.25),
        keys(16, "collude", "refuse", 3, stays="60s", away="1s"),
        keys(20, "rubbish", speed=0.25),
    ),
    found(
        strangers(2, 0.25, lease=4),
        keys(11, "withhold"),
        keys(20, "late", "rubbish", 1, after="424ms", stays="60s", away="30s", speed=0.5),
        keys(1, "rubbish", arrives="10s", over="2s", speed=0.25),
        keys(2, "collude", "wrong", 5, **CRASHING),
    ),
    found(
        strangers(4, 0.25, 0, lease=4),
        {"count": 40, "strategy": HALF_HONEST, "arrives": "10s", "speed": 0.25},
    ),
]
"""The worst that `python -m tests.campaigns worst_mixtures` found. The fourth to sixth took
strangers 8 to 14 times as long while a worker was no more patient with its own rank than with
others."""
