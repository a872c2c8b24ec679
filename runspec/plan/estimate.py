"""Estimate of a whole run, as `runspec plan` shows it, and its settled step by simulation."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from statistics import fmean
from typing import Any

from runspec import simulate as model
from runspec.core.models import ModelConfig, device_count, device_of
from runspec.core.models.parameters import StepFlops, parameter_count, sharing, step_flops
from runspec.core.schema import RunSpec, SamplerPool
from runspec.core.schema.role_names import island_names, island_spec
from runspec.estimate import LearnerMemory, assumed, learner_memory, speed, update_microbatches
from runspec.estimate.assumed import Assumed, Cost, cost, inputs
from runspec.estimate.broadcast import (
    Arrival,
    IslandEstimate,
    IslandsEstimate,
    arrivals,
    exchange,
    version_size,
)
from runspec.simulate.run import simulate

_STEPS = 10
"""Simulated steps beyond those that the lag needs to reach the steady state."""
_MAX_LAG = 8
"""Largest simulated `async_level`; a higher one counts as this."""


@dataclass(frozen=True)
class Timeline:
    """One step in the steady state; times in seconds."""

    step_s: float
    """Seconds from the end of one training step to the end of the next."""
    idle: dict[str, float]
    """Idle share of the time by role; for a pool, the mean of its replicas."""
    first_rollouts_s: float
    """Seconds from a step's first lease until its first submission is checked."""
    full_s: float
    """Seconds from a step's first lease until its batch is full."""
    start_s: float
    """Seconds from the publication of version 0 until the first step is trained."""
    lag: float
    """Mean over steps of the largest lag."""
    filled_share: float
    """Trained share of a step's groups; below 1 if `fill.max_groups` or `fill.deadline` ends it."""
    intervals: tuple[model.Interval, ...]
    """Tasks of all processes during `step_s`, for the step that is most like the mean."""

    @property
    def bottleneck(self) -> str:
        """Role that is idle for the least time."""
        return min(self.idle, key=lambda role: self.idle[role])


def timeline(spec: RunSpec, config: ModelConfig | None) -> tuple[Timeline | None, str]:
    """Simulate until the steady state, and measure the later half of the steps.

    Steady is the later half without the last steps, ahead of which nobody samples.

    Args:
        spec: spec of the run. Its steps and budget are ignored, because the steady state is that of
            a long run.
        config: shape of the model.

    Returns:
        The timeline and an empty text; or None and what the run waits for, if it trains too few
        steps.

    Raises:
        UserError: as `simulate`.
    """
    level = min(spec.grpo.async_level, _MAX_LAG)
    count = _STEPS + 3 * (level + 1)
    changes = {
        "steps": count,
        "algorithm": spec.grpo.model_copy(update={"async_level": level}),
        "budget": spec.budget.model_copy(update={"max_hours": None}),
    }
    run = simulate(spec.model_copy(update=changes), config)
    settled = run.steps[count // 2 : count - level - 1]
    ends = [step.trained_at for step in settled if step.trained_at is not None]
    if len(ends) < 2:
        return None, run.reason
    step_s = (ends[-1] - ends[0]) / (len(ends) - 1)
    idle = _idle(run.intervals, spec, ends[0], ends[-1])

    def unlike(ends: tuple[float, float]) -> float:
        here = _idle(run.intervals, spec, *ends)
        return sum(abs(here[role] - idle[role]) for role in idle)

    start = min(pairwise(ends), key=unlike)[0]
    return Timeline(
        step_s=step_s,
        idle=idle,
        first_rollouts_s=fmean(step.first_rollouts - step.opened for step in settled),
        full_s=fmean(step.closed - step.opened for step in settled),
        start_s=run.trained[0],
        lag=fmean(step.lag for step in settled),
        filled_share=fmean(step.groups for step in settled) / spec.grpo.prompts_per_step,
        intervals=tuple(
            replace(each, start=max(each.start - start, 0.0), end=min(each.end - start, step_s))
            for each in run.intervals
            if each.end > start and each.start < start + step_s
        ),
    ), ""


def _idle(
    intervals: tuple[model.Interval, ...], spec: RunSpec, start: float, end: float
) -> dict[str, float]:
    """Return idle shares by role; publisher and links count as one process."""
    members = {model.LEARNER: 1, model.BROADCAST: 1, model.VALIDATORS: spec.verify.validators}
    members |= {pool.name: pool.replicas for pool in spec.samplers}
    busy, travelled = dict.fromkeys(members, 0.0), start
    for each in sorted(intervals, key=lambda each: each.start):
        first, last = max(each.start, start), min(each.end, end)
        if each.role == model.BROADCAST:  # links work beside one another
            first, travelled = max(first, travelled), max(last, travelled)
        busy[each.role] += max(0.0, last - first)
    span = end - start
    return {role: 1 - busy[role] / (n * span) if span else 1.0 for role, n in members.items() if n}


@dataclass(frozen=True)
class LearnerEstimate:
    devices: int | None
    device_memory: float | None
    memory: LearnerMemory | None
    """Bytes on one device."""
    flops: StepFlops | None
    step_s: float | None
    shared_prompts: bool
    """Whether a prompt is computed once for all samples of its group."""


@dataclass(frozen=True)
class PoolEstimate:
    name: str
    replicas: int
    devices: int
    """Devices of one replica."""
    memory: speed.SamplerMemory | None
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
    drawn_bytes: int | None
    """Main memory in which version 0 is drawn; None where the model has weights."""
    corpus_bytes: float | None
    """Disk of a corpus of as many tokens as the run trains, of documents as long as rows."""
    corpus_s: float
    """Seconds in which process 0 makes it."""


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
    """`algorithm.fill.deadline`: a step that is not full then closes; None in a supervised run."""
    run_s: float | None
    """Seconds of all steps, from the publication of version 0."""
    cost: Cost | None
    assumed: tuple[Assumed, ...]
    unknown: tuple[str, ...]
    """Missing fields of the spec that the timeline, or the time of a step, needs."""
    stalled: str = ""
    """What the simulated run waits for, if it trains too few steps for a timeline."""
    max_hours: float | None = None
    """`budget.max_hours`; the run stops then."""
    supervised: SupervisedEstimate | None = None
    """Figures of `pretrain` and `sft`; None for `grpo`."""
    islands: IslandsEstimate | None = None
    """Exchange of shares; None for one learner. `learner` then is the first island."""
    audit_bytes: int | None = None
    """Bytes that published full states take in the store, with what they trained on."""

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
    unknown = tuple(model.unknown_speeds(spec, config))
    check = speed.check_tokens_per_s(spec, config)
    step_s = speed.learner_seconds(spec, config)
    flops = step_flops(spec, config, speed.mean_tokens(spec)) if config is not None else None
    settled, stalled, supervised = None, "", _supervised(spec, config, flops, step_s)
    if supervised is None and not unknown:
        settled, stalled = timeline(spec, config)
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
            shared_prompts=sharing(spec, cpu=spec.learner.hardware.kind == "cpu"),
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
        assumed=inputs(spec, config, check),
        unknown=unknown,
        stalled=stalled,
        max_hours=spec.budget.max_hours,
        audit_bytes=speed.published_states_bytes(spec, config) if config and spec.audit else None,
        supervised=supervised,
        islands=_islands(spec, config, step_s) if config is not None else None,
    )


def _islands(spec: RunSpec, config: ModelConfig, step_s: float | None) -> IslandsEstimate | None:
    """Return the figures of islands; None for one learner."""
    islands = spec.learner.islands
    if islands is None:
        return None
    sent, computed = exchange(spec, config), speed.island_seconds(spec, config)
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
    spec: RunSpec, config: ModelConfig | None, flops: StepFlops | None, step_s: float | None
) -> SupervisedEstimate | None:
    """Return the figures of a supervised run; None for `grpo`."""
    if (algorithm := spec.supervised) is None:
        return None
    tokens = algorithm.updates_per_step * algorithm.tokens_per_update
    size = version_size(spec, config) if config is not None else None
    each_token = assumed.DOCUMENT_BYTES / assumed.document_tokens(spec).value
    if config is not None:
        each_token += 2 if config.vocab_size <= 1 << 16 else 4
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
        publish_s=model.publish_seconds(spec, size) if size else None,
        drawn_bytes=4 * parameter_count(config) if config and spec.model.shape else None,
        corpus_bytes=spec.steps * tokens * each_token if config else None,
        corpus_s=speed.corpus_seconds(spec),
    )


def _pool(pool: SamplerPool, spec: RunSpec, config: ModelConfig | None) -> PoolEstimate:
    rate = speed.decode_speed(pool, spec, config)
    rollouts = speed.lease_groups(pool, spec) * spec.grpo.group_size
    lengths = [assumed.mean_new_tokens(spec).value] * rollouts
    prompt = assumed.mean_prompt_tokens(spec).value
    return PoolEstimate(
        name=pool.name,
        replicas=pool.replicas,
        devices=device_count(pool.hardware) or pool.parallel.devices,
        memory=speed.sampler_memory(pool, spec, config) if config is not None else None,
        tokens_per_s=rate.tokens_per_s(lengths, prompt) if rate else None,
        lease_s=rate.lease_seconds(lengths, prompt) if rate else None,
    )
