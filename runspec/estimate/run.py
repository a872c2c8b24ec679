"""Estimate of a whole run, as `runspec plan` shows it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache, partial
from math import exp, log, sqrt
from random import Random
from typing import Any

from runspec.core.models.config import ModelConfig
from runspec.core.models.flops import StepFlops, step_flops
from runspec.core.models.hardware import device_count, device_of
from runspec.core.models.parameters import parameter_count
from runspec.core.spec.islands import island_names, island_spec
from runspec.core.spec.schema import RunSpec, SamplerPool
from runspec.estimate import assumed
from runspec.estimate.assumed import Assumed
from runspec.estimate.broadcast import Arrival, VersionSize, arrivals, broadcast_times, version_size
from runspec.estimate.inputs import check_tokens_per_s, inputs
from runspec.estimate.islands import IslandEstimate, IslandsEstimate, exchange
from runspec.estimate.learner import LearnerMemory, learner_memory, update_microbatches
from runspec.estimate.price import Cost, cost
from runspec.estimate.sampler import SamplerMemory, lease_groups, sampler_memory
from runspec.estimate.speed import decode_speed, island_seconds, learner_seconds, mean_tokens
from runspec.estimate.steady import Timeline, timeline
from runspec.estimate.timeline import Lengths, Model, Replica


@dataclass(frozen=True)
class LearnerEstimate:
    devices: int | None
    device_memory: float | None
    memory: LearnerMemory | None
    """Bytes on one device."""
    flops: StepFlops | None
    step_s: float | None


@dataclass(frozen=True)
class PoolEstimate:
    name: str
    replicas: int
    devices: int
    """Devices of one replica."""
    memory: SamplerMemory | None
    """Bytes on one device."""
    tokens_per_s: float | None
    """Output tokens/s of one replica while it samples a lease."""
    lease_s: float | None


@dataclass(frozen=True)
class SupervisedEstimate:
    """Steps and versions of a run that trains on documents. Tokens are positions of packed rows."""

    updates: int
    """Optimizer updates of a step."""
    microbatches: int
    """Microbatches of an update."""
    step_tokens: int
    run_tokens: int
    """Tokens of all steps."""
    tokens_per_s: float | None
    """Tokens/s of the learner."""
    run_flops: float | None
    """FLOPs of all steps, useful and not."""
    versions: int
    """Published versions, version 0 included."""
    publish_every: int
    """Steps between two of them."""
    publish_s: float | None
    """Seconds of the publisher for one version."""


@dataclass(frozen=True)
class RunEstimate:
    """Estimate of a run; a figure is None if fields are missing, which `unknown` names."""

    parameters: int | None
    learner: LearnerEstimate
    samplers: tuple[PoolEstimate, ...]
    version_bytes: int | None
    """Bytes of a whole version."""
    follower_bytes: float | None
    """Bytes that a node with the version before fetches."""
    joiner_bytes: float | None
    """Most bytes that a node without any version fetches."""
    arrivals: tuple[Arrival, ...]
    """Arrivals at nodes with the version before, over declared links, the slowest last."""
    validators: int
    validator_tokens_per_s: float | None
    """Tokens/s of one validator."""
    timeline: Timeline | None
    steps: int
    fill_deadline_s: float | None
    """`algorithm.fill.deadline`, which the timeline leaves out; None in a supervised run.

    If `full_s` is longer, no batch gets full."""
    run_s: float | None
    """Seconds of all steps, from the publication of version 0."""
    cost: Cost | None
    assumed: tuple[Assumed, ...]
    unknown: tuple[str, ...]
    """Missing fields of the spec that the timeline, or the time of a step, needs."""
    supervised: SupervisedEstimate | None = None
    """Figures of `pretrain` and `sft`; None for `grpo`."""
    islands: IslandsEstimate | None = None
    """Exchange of shares; None for one learner. `learner` then is the first island."""

    def to_json(self) -> dict[str, Any]:
        """Return plain data under stable keys, derived figures included."""
        data = asdict(self)
        if self.learner.memory is not None:
            data["learner"]["memory"]["total"] = self.learner.memory.total
        for pool, entry in zip(self.samplers, data["samplers"], strict=True):
            if pool.memory is not None:
                entry["memory"]["kv_tokens"] = pool.memory.kv_tokens
                entry["memory"]["full_sequences"] = pool.memory.full_sequences
        if self.timeline is not None:
            data["timeline"]["bottleneck"] = self.timeline.bottleneck
        return data


def estimate_run(spec: RunSpec, config: ModelConfig | None) -> RunEstimate:
    """Estimate the needs and times of a run from its spec.

    Args:
        spec: spec of the run.
        config: shape of the model; None if unknown.
    """
    size = version_size(spec, config) if config is not None else None
    unknown = tuple(unknown_speeds(spec, config))
    check = check_tokens_per_s(spec, config)
    step_s = learner_seconds(spec, config)
    flops = step_flops(spec, config, mean_tokens(spec)) if config is not None else None
    settled, supervised = None, _supervised(spec, size, flops, step_s)
    if supervised is None and not unknown and size is not None:
        settled = timeline(run_model(spec, config, size))
    run_s = settled.start_s + (spec.steps - 1) * settled.step_s if settled else None
    if supervised is not None and step_s is not None:
        run_s = spec.steps * step_s
    own = island_spec(spec, next(iter(island_names(spec)), ""))
    return RunEstimate(
        parameters=parameter_count(config) if config is not None else None,
        learner=LearnerEstimate(
            devices=device_count(spec.learner.hardware, spec.learner.mesh.slices),
            device_memory=device_of(spec.learner.hardware).memory,
            memory=learner_memory(own, config) if config is not None else None,
            flops=flops,
            step_s=step_s,
        ),
        samplers=tuple(_pool(pool, spec, config) for pool in spec.samplers),
        version_bytes=size.whole if size else None,
        follower_bytes=size.follower if size else None,
        joiner_bytes=size.joiner if size else None,
        arrivals=tuple(arrivals(spec, size.follower)) if size else (),
        validators=spec.verify.validators,
        validator_tokens_per_s=check.value if check else None,
        timeline=settled,
        steps=spec.steps,
        fill_deadline_s=spec.grpo.fill.deadline if supervised is None else None,
        run_s=run_s,
        cost=cost(spec, run_s),
        assumed=inputs(spec, config),
        unknown=unknown,
        supervised=supervised,
        islands=_islands(spec, config, step_s) if config is not None else None,
    )


def _islands(spec: RunSpec, config: ModelConfig, step_s: float | None) -> IslandsEstimate | None:
    """Return the figures of islands; None for one learner."""
    islands = spec.learner.islands
    if islands is None:
        return None
    sent, computed = exchange(spec, config), island_seconds(spec, config)
    known = {name: seconds for name, seconds in computed.items() if seconds is not None}
    fetched, found = (len(islands.members) - 1) * sent.share_bytes, []
    for member in islands.members:
        own, compute_s = island_spec(spec, member.name).learner, known.get(member.name)
        found.append(
            IslandEstimate(
                name=member.name,
                hardware=own.hardware.kind,
                devices=device_count(own.hardware, own.mesh.slices),
                compute_s=compute_s,
                up_bytes=fetched,
                down_bytes=fetched,
                transfer_s=sent.transfer_s[member.name],
                utilization=compute_s / step_s if compute_s and step_s else None,
            )
        )
    return IslandsEstimate(
        codec=islands.codec.kind,
        share_bytes=sent.share_bytes,
        whole_bytes=sent.whole_bytes,
        overlap=islands.overlap,
        host_s=sent.own_s + sent.read_s,
        host_bytes=sent.host_bytes,
        exposed_s=sent.exposed_seconds(islands, known) if len(known) == len(computed) else None,
        islands=tuple(found),
    )


def _supervised(
    spec: RunSpec, size: VersionSize | None, flops: StepFlops | None, step_s: float | None
) -> SupervisedEstimate | None:
    """Return the figures of a supervised run; None for `grpo`."""
    if (algorithm := spec.supervised) is None:
        return None
    tokens = algorithm.updates_per_step * algorithm.tokens_per_update
    return SupervisedEstimate(
        updates=algorithm.updates_per_step,
        microbatches=sum(
            update_microbatches(island_spec(spec, name)) for name in island_names(spec) or [""]
        ),
        step_tokens=tokens,
        run_tokens=spec.steps * tokens,
        tokens_per_s=tokens / step_s if step_s else None,
        run_flops=spec.steps * flops.total if flops else None,
        versions=1 + -(-spec.steps // algorithm.publish_every),
        publish_every=algorithm.publish_every,
        publish_s=_publish_seconds(spec, size) if size else None,
    )


def run_model(spec: RunSpec, config: ModelConfig | None, size: VersionSize) -> Model:
    """Return the timeline's model of a run.

    Args:
        spec: a spec whose speeds are all known.
        config: shape of the model.
        size: sizes of a version.
    """
    train_s = learner_seconds(spec, config)
    check = check_tokens_per_s(spec, config)
    assert train_s is not None, "asked for the model of an unknown speed"
    prompt = assumed.mean_prompt_tokens(spec).value
    share = spec.verify.prefill_share

    def check_s(lengths: Lengths) -> float:
        assert check is not None, "asked for the model of an unknown speed"
        return share * (len(lengths) * prompt + sum(lengths)) / check.value

    lengths, filtered = draws(
        seed=spec.seed,
        group_size=spec.grpo.group_size,
        mean=assumed.mean_new_tokens(spec).value,
        spread=assumed.LENGTH_SPREAD,
        longest=max(pool.max_new_tokens for pool in spec.samplers),
        filtered_share=assumed.filtered_share(spec).value,
    )
    return Model(
        steps=spec.steps,
        groups=spec.grpo.prompts_per_step,
        async_level=spec.grpo.async_level,
        train_s=train_s,
        publish_s=_publish_seconds(spec, size),
        replicas=tuple(_replicas(spec, config, size, prompt)),
        validators=spec.verify.validators,
        check_s=check_s,
        lengths=lengths,
        filtered=filtered,
        max_groups=spec.grpo.fill.max_groups,
    )


def _publish_seconds(spec: RunSpec, size: VersionSize) -> float:
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


def _replicas(
    spec: RunSpec, config: ModelConfig | None, size: VersionSize, prompt: float
) -> Iterator[Replica]:
    fetch = broadcast_times(spec, size.follower)
    rebuild_s = rebuild_seconds(size)
    for pool in spec.samplers:
        speed = decode_speed(pool, spec, config)
        assert speed is not None, "asked for the model of an unknown speed"
        sample_s = cache(partial(speed.lease_seconds, prompt=prompt))  # for all models of the run
        for index in range(pool.replicas):
            yield Replica(
                pool=pool.name,
                fetch_s=fetch.get(f"{pool.name}-{index}", 0.0) + rebuild_s,
                load_s=size.whole / assumed.LOAD_BYTES_S,
                lease_groups=lease_groups(pool, spec),
                sample_s=sample_s,
            )


def rebuild_seconds(size: VersionSize) -> float:
    """Return the seconds in which a sampler rebuilds a version from a delta; 0 without deltas."""
    return size.whole / assumed.REBUILD_BYTES_S if size.follower < size.whole else 0.0


def _pool(pool: SamplerPool, spec: RunSpec, config: ModelConfig | None) -> PoolEstimate:
    speed = decode_speed(pool, spec, config)
    rollouts = lease_groups(pool, spec) * spec.grpo.group_size
    lengths = [assumed.mean_new_tokens(spec).value] * rollouts
    prompt = assumed.mean_prompt_tokens(spec).value
    return PoolEstimate(
        name=pool.name,
        replicas=pool.replicas,
        devices=device_count(pool.hardware) or pool.parallel.devices,
        memory=sampler_memory(pool, spec, config) if config is not None else None,
        tokens_per_s=speed.tokens_per_s(lengths, prompt) if speed else None,
        lease_s=speed.lease_seconds(lengths, prompt) if speed else None,
    )


def unknown_speeds(spec: RunSpec, config: ModelConfig | None) -> Iterator[str]:
    """Fields of the spec without which there is no timeline."""
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
