"""Times of a run's roles, drawn lengths and filtered groups, and the virtual clock."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from math import exp, log, sqrt
from random import Random
from typing import Literal

from runspec.core.models.config import ModelConfig
from runspec.core.spec.schema import RunSpec
from runspec.estimate import assumed
from runspec.estimate.broadcast import VersionSize
from runspec.estimate.inputs import check_tokens_per_s
from runspec.estimate.speed import decode_speed, island_seconds, learner_seconds

Lengths = tuple[float, ...]
"""Output tokens of each rollout of a lease."""

LEARNER, BROADCAST, VALIDATORS = "learner", "broadcast", "validators"


@dataclass(frozen=True)
class Model:
    """Times and sizes of a run."""

    groups: int
    """Groups that a step trains."""
    train_s: float
    """Seconds of the learner for a full step."""
    publish_s: float
    recompute_s: Callable[[Lengths], float]
    """Seconds of a validator to recompute the submission of a lease."""
    lengths: Callable[[int, int], Sequence[float]]
    """Output tokens of each rollout, by step and number of the group within the step."""
    filtered: Callable[[int, int], bool]
    """Whether the filter drops a group, by step and number of the group within the step."""


@dataclass(frozen=True)
class Interval:
    """Interval in which one process does one task."""

    role: str
    """`learner`, `broadcast` (publisher and links), a pool, or `validators`."""
    member: str
    """Name of the process, or of that whose link it is."""
    what: Literal["train", "publish", "fetch", "sample", "check"]
    """`sample` begins with loading the version, if the engine has another."""
    step: int
    """The step; for `publish` and `fetch` the version."""
    start: float
    end: float


class Clock:
    """Virtual time in seconds since version 0 was published, and the scheduled actions.

    Actions run in order of time; actions of equal times run in the order of scheduling.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.actions: list[tuple[float, int, Callable[[], None]]] = []
        """Heap of the scheduled actions, with their times."""
        self._count = 0

    def at(self, time: float, action: Callable[[], None]) -> None:
        """Schedule an action at a time."""
        heapq.heappush(self.actions, (max(time, self.now), self._count, action))
        self._count += 1

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        """Schedule an action some seconds from now."""
        self.at(self.now + seconds, action)

    def run_next(self) -> None:
        """Advance to the next action and run it."""
        self.now, _, action = heapq.heappop(self.actions)
        action()


def run_model(spec: RunSpec, config: ModelConfig | None, size: VersionSize) -> Model:
    """Return the model of a run.

    Args:
        spec: a spec whose speeds are all known.
        config: shape of the model.
        size: sizes of a version.
    """
    train_s = learner_seconds(spec, config)
    check = check_tokens_per_s(spec, config)
    assert train_s is not None, "asked for the model of an unknown speed"
    prompt = assumed.mean_prompt_tokens(spec).value

    def recompute_s(lengths: Lengths) -> float:
        assert check is not None, "asked for the model of an unknown speed"
        return (len(lengths) * prompt + sum(lengths)) / check.value

    lengths, filtered = draws(
        seed=spec.seed,
        group_size=spec.grpo.group_size,
        mean=assumed.mean_new_tokens(spec).value,
        spread=assumed.LENGTH_SPREAD,
        longest=max(pool.max_new_tokens for pool in spec.samplers),
        filtered_share=assumed.filtered_share(spec).value,
    )
    return Model(
        groups=spec.grpo.prompts_per_step,
        train_s=train_s,
        publish_s=publish_seconds(spec, size),
        recompute_s=recompute_s,
        lengths=lengths,
        filtered=filtered,
    )


def publish_seconds(spec: RunSpec, size: VersionSize) -> float:
    """Return the seconds in which the publisher makes one version."""
    deltas = size.whole / assumed.DIFF_BYTES_S if spec.broadcast.format == "delta" else 0.0
    return size.whole / assumed.PUBLISH_BYTES_S + deltas


def draws(
    *,
    seed: int,
    group_size: int,
    mean: float,
    spread: float,
    longest: float,
    filtered_share: float,
) -> tuple[Callable[[int, int], Sequence[float]], Callable[[int, int], bool]]:
    """Return lengths and filter verdicts of groups, as functions of step and group.

    Lengths are log-normal with the mean and, over it, the standard deviation `spread`, cut at
    `longest`; what is cut off is missing from the mean.
    """
    sigma = sqrt(log(1.0 + spread * spread))
    mu = log(mean) - sigma * sigma / 2

    @cache
    def lengths(step: int, group: int) -> tuple[float, ...]:
        random = Random(f"{seed}/{step}/{group}/lengths")
        drawn = (exp(random.gauss(mu, sigma)) for _ in range(group_size))
        return tuple(min(max(1.0, length), longest) for length in drawn)

    @cache
    def filtered(step: int, group: int) -> bool:
        if filtered_share == 0.0:  # the usual case, without a draw for each group
            return False
        return Random(f"{seed}/{step}/{group}/filter").random() < filtered_share

    return lengths, filtered


def unknown_speeds(spec: RunSpec, config: ModelConfig | None) -> Iterator[str]:
    """Yield the fields of the spec without which a run cannot be simulated."""
    if config is None:
        yield "model.hf"
        return
    if learner_seconds(spec, config) is None:
        speeds = island_seconds(spec, config)
        first = next(iter(speeds), "")
        for name in [name for name, seconds in speeds.items() if seconds is None] or [first]:
            member = "" if name == first else f"islands.members.{name}."
            yield f"learner.{member}hardware.peak_flops"
    for pool in spec.samplers:
        if decode_speed(pool, spec, config) is None:
            yield f"samplers.{pool.name}.tokens_per_s"
    if spec.verify.validators and check_tokens_per_s(spec, config) is None:
        yield "verify.tokens_per_s"
