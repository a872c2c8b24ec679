"""The timeline against INTELLECT-2 (arXiv 2505.07291): the fleet fitted on TARGET-SHORT predicts
TARGET-LONG.

    python -m benchmarks.reference_run

prints JSON: the published figures, every input that is assumed, what was fitted, what follows, and
how the answer moves with each input. Nothing is fitted on TARGET-LONG.

One round is simulated with `runspec.simulate`: at time 0 all replicas have a version, as after the
paper's broadcast; they load it, sample leases, validators check them, the batch fills.
Two unknowns are fitted on TARGET-SHORT: the rate of the fleet, to the 22 minutes until its batch is
full, and the time before sampling starts, to the 10 minutes until its first rollouts.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from math import inf
from pathlib import Path
from random import Random
from typing import Any

from runspec.core.models import DEVICES
from runspec.core.models.family import model_config
from runspec.core.models.parameters import forward_flops, step_flops
from runspec.core.schema import RunSpec
from runspec.core.schema.load import SpecFiles
from runspec.estimate.assumed import Assumed
from runspec.estimate.broadcast import arrivals, version_bytes
from runspec.estimate.speed import Decode, decode_speed
from runspec.lint.check import check_spec
from runspec.simulate import Lengths, Model, draws
from runspec.simulate.population import Group, Member, Strategy, StrategyBlock, ValidatorsBlock
from runspec.simulate.run import Simulation
from verify.coordinator.machine.state import Policy

SPECS = Path(__file__).parents[1] / "specs"
MINUTE = 60.0
SHORT, LONG = [1000, 2000, 3000, 4000], [2000, 4000, 6000, 8000, 10000]
"""Target lengths of the two runs, as the shipped specs have them."""


@dataclass(frozen=True)
class Published:
    """Measured in the paper's runs; minutes. Fills count from the end of the broadcast."""

    broadcast_bytes: float = 62e9
    broadcast_rate: float = 590e6
    """Bits/s."""
    broadcast: float = 14.0
    first_rollouts: float = 10.0
    full_short: float = 22.0
    full_long: float = 29.0
    train_short: float = 22.0
    train_long: float = 21.0
    verification: float = 1.0
    inference_flops: float = 4.5
    """For each one of training."""


@dataclass(frozen=True)
class Inputs:
    """What the paper does not say.

    Groups without advantage are sampled again; what share they are is not published. The rate that
    is fitted is of groups that count, so the share matters only where it differs between the runs.
    """

    natural_tokens: float = 9000.0
    obedience: float = 0.5
    prompt_tokens: float = 300.0
    spread: float = 0.6
    replicas: int = 16
    groups_per_submission: int = 4
    sampler_bandwidth: float = 0.6
    learner_mfu: float = 0.4

    def mean_tokens(self, targets: list[int]) -> float:
        """The mean output: part of the way from what the model writes of itself to the target."""
        target = sum(targets) / len(targets)
        return self.natural_tokens + self.obedience * (target - self.natural_tokens)


WHY = {
    "natural_tokens": (
        "tokens",
        "mean output of QwQ-32B on these problems when no length is asked for; not published",
    ),
    "obedience": (
        "share",
        "way from there to the asked length, over the run; the paper reports falling length"
        " penalties but no full control of length, so neither 0 nor 1: the middle",
    ),
    "prompt_tokens": ("tokens", "mean prompt, problem and instruction"),
    "spread": ("of the mean", "standard deviation of output lengths, log-normal"),
    "replicas": ("replicas", "that the fleet's rate is divided among; not published"),
    "groups_per_submission": ("groups", "specs/intellect2.yaml; theirs is not published"),
    "sampler_bandwidth": (
        "share",
        "runspec.estimate.assumed; the fit scales it, so only the ratio of FLOPs depends on it",
    ),
    "learner_mfu": ("share", "runspec.estimate.assumed; only the learner's devices depend on it"),
}
"""Unit of each input, and why it has its value."""
VARIED = {
    "natural_tokens": (6000.0, 12000.0),
    "obedience": (0.25, 0.75),
    "prompt_tokens": (150.0, 600.0),
    "spread": (0.3, 0.9),
    "replicas": (8, 32),
    "groups_per_submission": (1, 8),
}
"""Other values of the inputs that move the prediction."""


@dataclass(frozen=True)
class Fit:
    """Of the fleet, on TARGET-SHORT."""

    speed: float
    """Times the roofline of `replicas` replicas of four H100."""
    start_s: float
    """Between the broadcast's end and the first token."""


@dataclass(frozen=True)
class Round:
    """Minutes from the broadcast's end, and what was sampled."""

    first_rollouts: float
    full: float
    tokens: float
    """Sampled, filtered groups included."""


def load(name: str) -> RunSpec:
    """A shipped spec."""
    spec = check_spec(SpecFiles(SPECS / f"{name}.yaml")).spec
    assert spec is not None, f"specs/{name}.yaml is not valid"
    return spec


def targets_of(spec: RunSpec) -> list[int]:
    """The lengths that a spec asks for."""
    return [target for term in spec.reward for target in term.targets or []]


def roofline(spec: RunSpec, inputs: Inputs) -> Decode:
    """Of one replica, four H100 as specs/intellect2.yaml has them."""
    estimate = spec.estimate.model_copy(
        update={
            "mean_new_tokens": inputs.mean_tokens(targets_of(spec)),
            "sampler_bandwidth": inputs.sampler_bandwidth,
        }
    )
    spec = spec.model_copy(update={"estimate": estimate})
    speed = decode_speed(spec.samplers[0], spec, model_config(spec))
    assert speed is not None, "the shipped spec names known hardware"
    return speed


def one_round(spec: RunSpec, inputs: Inputs, fit: Fit, published: Published) -> Round:
    """A batch from the end of a broadcast on."""
    speed = roofline(spec, inputs)

    def sample_s(lengths: Lengths) -> float:
        return speed.lease_seconds(lengths, inputs.prompt_tokens) / fit.speed

    lengths, filtered = draws(
        seed=spec.seed,
        group_size=spec.algorithm.group_size,
        mean=inputs.mean_tokens(targets_of(spec)),
        spread=inputs.spread,
        longest=spec.samplers[0].max_new_tokens,
        filtered_share=0.0,
    )
    groups = spec.algorithm.prompts_per_step

    def check_s(_: Lengths) -> float:
        return published.verification * MINUTE

    pool, fleet = spec.samplers[0].name, Group(name="fleet", count=inputs.replicas, known=True)
    policy = replace(
        Policy.of(spec),
        steps=1,
        prefill_share=1.0,
        lease_timeout_s=inf,
        deadline_s=inf,
        groups_per_submission={pool: inputs.groups_per_submission},
    )
    simulation = Simulation(
        Model(groups, 0.0, 0.0, check_s, lengths, filtered),
        policy,
        [
            Member(
                f"fleet-{i}",
                fleet,
                pool,
                fetch_s=0.0,
                first_fetch_s=0.0,
                load_s=fit.start_s,
                sample_s=sample_s,
                strategy=Strategy(StrategyBlock(), []),
                rng=Random(i),
            )
            for i in range(inputs.replicas)
        ],
        ValidatorsBlock(count=groups),
        request_s=0.0,
        backlog=groups,
        seed=0,
        horizon_s=inf,
    )
    [step] = simulation.run().steps
    tokens = sum(sum(lengths(0, group)) for group in range(step.leased))
    return Round(step.first_rollouts / MINUTE, step.closed / MINUTE, tokens)


def fit_fleet(spec: RunSpec, inputs: Inputs, published: Published) -> Fit:
    """Rate and start such that TARGET-SHORT's first rollouts and full batch come when they did.

    A faster fleet leaves more of the ten minutes to the start and fills the rest sooner, so the
    full batch comes the earlier the faster it is: bisection.
    """

    def with_speed(speed: float) -> Fit:
        at_once = one_round(spec, inputs, Fit(speed, 0.0), published)
        missing = published.first_rollouts - at_once.first_rollouts
        return Fit(speed, max(0.0, missing) * MINUTE)

    low, high = 0.01, 100.0
    for _ in range(24):
        middle = (low * high) ** 0.5
        if one_round(spec, inputs, with_speed(middle), published).full > published.full_short:
            low = middle
        else:
            high = middle
    return with_speed(high)


def predict(inputs: Inputs, published: Published) -> tuple[Fit, Round, Round]:
    """The fit, TARGET-SHORT as fitted, TARGET-LONG as predicted."""
    short, long = load("target_short"), load("target_long")
    fit = fit_fleet(short, inputs, published)
    return (
        fit,
        one_round(short, inputs, fit, published),
        one_round(long, inputs, fit, published),
    )


def error(predicted: float, published: float) -> float:
    """Relative."""
    return predicted / published - 1.0


def check(published: Published) -> dict[str, Any]:
    """Everything that is printed."""
    inputs = Inputs()
    fit, short, long = predict(inputs, published)
    return {
        "published": asdict(published),
        "assumed": [
            asdict(Assumed(name, value, *WHY[name])) for name, value in asdict(inputs).items()
        ],
        "fit": {**asdict(fit), "mean_tokens_short": inputs.mean_tokens(SHORT), **asdict(short)},
        "prediction": {
            **asdict(long),
            "mean_tokens_long": inputs.mean_tokens(LONG),
            "published": published.full_long,
            "error": error(long.full, published.full_long),
        },
        "broadcast": broadcast(published),
        "flops": flops(inputs, fit, published),
        "sensitivity": [
            {"input": name, "value": value, **moved(inputs, name, value, published)}
            for name, values in VARIED.items()
            for value in values
        ],
    }


def moved(inputs: Inputs, name: str, value: float, published: Published) -> dict[str, float]:
    """TARGET-LONG's figures with another value of an input, the fleet fitted anew."""
    change: dict[str, Any] = {name: value}
    _, _, long = predict(replace(inputs, **change), published)
    return {
        "first_rollouts": long.first_rollouts,
        "full": long.full,
        "error": error(long.full, published.full_long),
    }


def broadcast(published: Published) -> dict[str, float]:
    """Minutes over one link of the published rate, and the exact bytes of QwQ-32B in bfloat16."""
    spec = load("target_long")
    pools = [
        pool.model_copy(update={"download": published.broadcast_rate}) for pool in spec.samplers
    ]
    spec = spec.model_copy(update={"samplers": pools})
    config = model_config(spec)
    assert config is not None, "the shape ships with runspec"
    size = version_bytes(config, spec.broadcast.dtype)
    minutes = arrivals(spec, published.broadcast_bytes)[-1].seconds / MINUTE
    return {
        "minutes": minutes,
        "published": published.broadcast,
        "error": error(minutes, published.broadcast),
        "version_bytes": size,
        "minutes_of_version_bytes": arrivals(spec, size)[-1].seconds / MINUTE,
    }


def flops(inputs: Inputs, fit: Fit, published: Published) -> dict[str, float]:
    """Inference over training, TARGET-SHORT, counted in two ways.

    Done: forward passes over what is sampled, over the passes of a training step (update, pi_old,
    reference). Held: peak FLOP/s of the fitted fleet, over that of the learner's devices that take
    the published time at the assumed MFU.
    """
    spec = load("target_short")
    config = model_config(spec)
    assert config is not None, "the shape ships with runspec"
    mean = inputs.prompt_tokens + inputs.mean_tokens(SHORT)
    rollouts = spec.algorithm.prompts_per_step * spec.algorithm.group_size
    step = step_flops(spec, config, mean)
    trained = step.useful + step.old + step.reference
    peak = DEVICES[spec.samplers[0].hardware.kind].peak_flops
    assert peak is not None, "the shipped spec names known hardware"
    fleet = fit.speed * inputs.replicas * spec.samplers[0].parallel.tensor * peak
    learner = trained / (published.train_short * MINUTE * inputs.learner_mfu)
    longer = step_flops(spec, config, inputs.prompt_tokens + inputs.mean_tokens(LONG))
    ratio = (longer.useful + longer.old + longer.reference) / trained
    return {
        "published": published.inference_flops,
        "done": rollouts * forward_flops(config, [mean]) / trained,
        "held": fleet / learner,
        "fleet_devices": fleet / peak,
        "learner_devices": learner / peak,
        "train_long_minutes": ratio * published.train_short,
        "train_long_published": published.train_long,
    }


def main() -> None:
    print(json.dumps(check(Published()), indent=2))


if __name__ == "__main__":
    main()
