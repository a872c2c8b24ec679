"""Figures that an estimate assumes if the spec gives none, each with its source; and the costs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from runspec.core.models import ModelConfig, device_count, device_of
from runspec.core.models.parameters import MEMORY_UTILIZATION, parameter_count, trained_count
from runspec.core.schema import Hardware, RunSpec, SamplerPool
from runspec.core.schema.role_names import island_names, island_role, island_spec, members
from runspec.core.schema.source_files import column_of

LEARNER_MFU = 0.4
"""Share of the peak that the learner's useful FLOPs reach. Pre-training of dense models reaches
0.55 on H100 and 0.62 on v5p (MaxText's published tables), a trainer of reinforcement learning
0.14 at 16k and 0.35 at 64k tokens (prime-rl, 4B on 8 x H100); packed rows lie between."""
SAMPLER_MFU = 0.4
"""Share of the peak that prefill reaches, in samplers and validators, without a backward pass."""
SAMPLER_BANDWIDTH = 0.6
"""Share of the memory bandwidth that decoding reaches, launches and gaps included. Kernels alone
reach about 0.8 of it; the engine here runs eagerly, without CUDA graphs."""
PROMPT_SHARE = 0.25
"""Mean length of a prompt, as a share of `data.max_prompt_tokens`."""
LENGTH_SPREAD = 0.6
"""Standard deviation of output lengths over their mean, drawn log-normally."""
LOAD_BYTES_S = 2e9
"""Rate at which a sampler reads a version from its disk, checks it and loads it, bytes/s."""
PUBLISH_BYTES_S = 1e9
"""Rate at which the publisher turns a checkpoint into signed files, bytes/s."""
DIFF_BYTES_S = 1e9
"""Rate at which the publisher compares two versions and encodes a delta, bytes/s of one version."""
REBUILD_BYTES_S = 1e9
"""Rate at which a sampler copies the version that it holds, applies a delta and checks all of it,
bytes/s."""
SHARE_BYTES_S = 1e9
"""Rate of one pass of an island's host over its parameters, bytes/s of float32: a codec's, a hash,
or the outer update. Measured on one core: .4 to 3.4 GB/s by codec."""
ROUND_TRIPS = 5
"""Round trips one after another from the last offer of a step until an island has all shares: a
connection and the offer, at whose arrival the record is sent to those who wait for it; another
connection, the manifest, the chunks."""
REPORT_TRIPS = 2
"""Round trips in which an island reports an outer state: a connection and the request."""
CHANGED_SHARE = 0.01
"""Share of the bf16 weights whose bits a step changes at the learning rates of such runs: about
1 % (PULSE, arXiv 2602.03839)."""
LORA_GAIN = 10.0
"""Best learning rate of adapters over that of all weights."""
CPU_FLOPS = 1e10
"""Peak of a CPU's device in FLOP/s, where all roles share two cores; `runspec plan` alone guesses
it."""
SAMPLED_TOKEN_S, CHECKED_TOKEN_S = 4e-4, 1e-4
"""Seconds of a token beside its FLOPs, in a replica and in a validator on a CPU. With `CPU_FLOPS`
they are about what the laptop profile's 0.2 M parameters reach on two cores."""
TOKENIZED_PER_S, IDS_PER_S = 0.45e6, 25e6
"""Tokens/s at which a corpus is made of text, and of Parquet files of token ids; measured on a core
(docs/learner_jax.md)."""
HOST_CORES = 16
"""Cores of an accelerator's host that tokenize: the process that reads for them feeds no more."""
DOCUMENT_BYTES = 56.0
"""Of a corpus on disk, for each document beside its tokens."""
OURS = "assumed, not measured"
"""Source of a figure of this package, which no field of the spec gives."""
_SIGNIFICAND_BITS = {"float32": 24, "bfloat16": 8}


@dataclass(frozen=True)
class Assumed:
    """Input of an estimate."""

    name: str
    value: float
    unit: str
    source: str
    """Field of the spec, its derivation, or `OURS`."""


def learner_mfu(spec: RunSpec) -> Assumed:
    return _figure(spec, "learner_mfu", LEARNER_MFU, OURS)


def sampler_mfu(spec: RunSpec) -> Assumed:
    return _figure(spec, "sampler_mfu", SAMPLER_MFU, OURS)


def sampler_bandwidth(spec: RunSpec) -> Assumed:
    return _figure(spec, "sampler_bandwidth", SAMPLER_BANDWIDTH, OURS)


def filtered_share(spec: RunSpec) -> Assumed:
    """Return the filtered share: 0 without a filter, or if the spec gives none."""
    if not spec.grpo.filters.zero_variance:
        return Assumed("filtered share", 0.0, "share", "algorithm.filters: none is on")
    return _figure(spec, "filtered_share", 0.0, OURS)


def weight_move(spec: RunSpec, config: ModelConfig) -> float:
    """Return the approximate change of a weight by one update at the rate `lr`.

    AdamW moves every trained weight by about lr. With sgd the norm of an update is at most
    lr clip_norm / (1 - momentum), which P trained weights share: 1 / sqrt(P) of it each. Adapters
    have `LORA_GAIN` times the rate for the same change of the model.

    Args:
        spec: of the run.
        config: shape of the model.
    """
    optimizer, lora = spec.optimizer, spec.learner.lora
    move = optimizer.lr / (LORA_GAIN if lora else 1.0)
    if optimizer.kind == "sgd":
        move *= optimizer.clip_norm / (1.0 - optimizer.momentum)
        move /= trained_count(config, lora) ** 0.5
    return move


def changed_share(spec: RunSpec, config: ModelConfig) -> Assumed:
    """Return the share of the published elements whose bits change in one version.

    A usual weight is about D^-1/2. There, numbers of p significant bits are about D^-1/2 2^-p
    apart, so the share is about `weight_move` D^1/2 2^p, and at most 1. It is at least
    `CHANGED_SHARE`, which was measured. The updates between two versions of a supervised run count
    as if they all moved a weight the same way.

    Args:
        spec: of the run.
        config: shape of the model, D its hidden size.
    """
    bits = _SIGNIFICAND_BITS[spec.broadcast.dtype]
    moved = weight_move(spec, config) * config.hidden_size**0.5 * 2**bits
    if (supervised := spec.supervised) is not None:
        moved *= supervised.publish_every * supervised.updates_per_step
    moved = min(1.0, moved)
    if moved > CHANGED_SHARE:
        return _figure(spec, "changed_share", moved, "optimizer.lr and broadcast.dtype")
    return _figure(spec, "changed_share", CHANGED_SHARE, "PULSE, arXiv 2602.03839")


def mean_prompt_tokens(spec: RunSpec) -> Assumed:
    """Return the mean prompt length of the spec, else a share of the longest prompt."""
    value = PROMPT_SHARE * spec.data.max_prompt_tokens
    source = f"{PROMPT_SHARE:g} of data.max_prompt_tokens"
    return _figure(spec, "mean_prompt_tokens", value, source, "tokens")


def document_tokens(spec: RunSpec) -> Assumed:
    """Return the length of a document of a supervised run: that of a row, for most attention."""
    tokens = spec.learner.packing.tokens
    return Assumed("a document", tokens, "tokens", "learner.packing.tokens: documents fill rows")


def corpus_rate(spec: RunSpec) -> Assumed:
    """Return the speed at which the learner's host makes a corpus: text on all of its cores."""
    kind, measured = spec.algorithm.kind, "measured on a core"
    if all(column_of(each, kind)[0] == "tokens" for each in spec.data.sources):
        return Assumed("reading token ids", IDS_PER_S, "tokens/s", measured)
    if spec.learner.hardware.kind == "cpu":
        return Assumed("tokenizing", TOKENIZED_PER_S, "tokens/s", measured)
    return Assumed("tokenizing", HOST_CORES * TOKENIZED_PER_S, "tokens/s", OURS)


def mean_new_tokens(spec: RunSpec) -> Assumed:
    """Return the mean output length of the spec, of the targets, or half of the longest output."""
    longest = max(pool.max_new_tokens for pool in spec.samplers)
    targets = [target for term in spec.reward for target in term.targets or []]
    if targets:
        mean = sum(min(target, longest) for target in targets) / len(targets)
        return _figure(spec, "mean_new_tokens", mean, "mean of the target lengths", "tokens")
    return _figure(spec, "mean_new_tokens", longest / 2, "half of max_new_tokens", "tokens")


def _figure(spec: RunSpec, field: str, default: float, source: str, unit: str = "share") -> Assumed:
    """Return the figure of a field of `estimate`; a default and its source if the spec has none."""
    if (given := getattr(spec.estimate, field)) is not None:
        default, source = given, f"estimate.{field}"
    return Assumed(field.replace("_", " "), default, unit, source)


def with_cpu_speeds(spec: RunSpec, config: ModelConfig) -> tuple[RunSpec, list[str]]:
    """Return the spec with guesses for speeds of CPUs that it does not give, and their fields."""
    guessed, learner, verify = [], spec.learner, spec.verify
    token_s = 2.0 * parameter_count(config) / CPU_FLOPS
    if learner.hardware.kind == "cpu" and learner.hardware.peak_flops is None:
        guessed.append("learner.hardware.peak_flops")
        faster = learner.hardware.model_copy(update={"peak_flops": CPU_FLOPS})
        learner = learner.model_copy(update={"hardware": faster})
    pools = []
    for pool in spec.samplers:
        if pool.hardware.kind == "cpu" and pool.tokens_per_s is None:
            guessed.append(f"samplers.{pool.name}.tokens_per_s")
            pool = pool.model_copy(update={"tokens_per_s": 1.0 / (SAMPLED_TOKEN_S + token_s)})
        pools.append(pool)
    if verify.tokens_per_s is None and guessed and verify.hardware is None:
        guessed.append("verify.tokens_per_s")
        verify = verify.model_copy(update={"tokens_per_s": 1.0 / (CHECKED_TOKEN_S + token_s)})
    changes = {"learner": learner, "samplers": pools, "verify": verify}
    return spec.model_copy(update=changes), guessed


def inputs(spec: RunSpec, config: ModelConfig | None, check: Assumed | None) -> tuple[Assumed, ...]:
    """Return all figures, in the order of a step.

    Args:
        spec: spec of the run.
        config: shape of the model, if known.
        check: rate of a validator, if known.
    """
    lengths: tuple[Assumed, ...] = (
        (
            mean_prompt_tokens(spec),
            mean_new_tokens(spec),
            Assumed("length spread", LENGTH_SPREAD, "of the mean", OURS),
            filtered_share(spec),
        )
        if spec.supervised is None
        else (document_tokens(spec), corpus_rate(spec))
    )
    loading = [Assumed("loading", LOAD_BYTES_S, "bytes/s", OURS)]
    deltas = []
    if spec.broadcast.format == "delta" and config is not None:
        deltas = [
            changed_share(spec, config),
            Assumed("finding what changed", DIFF_BYTES_S, "bytes/s", OURS),
            Assumed("rebuilding from a delta", REBUILD_BYTES_S, "bytes/s", OURS),
        ]
    links = {"broadcast.origin.upload": spec.broadcast.origin.upload}
    for relay in spec.broadcast.relays:
        links[f"broadcast.relays.{relay.name}.download"] = relay.download
        links[f"broadcast.relays.{relay.name}.upload"] = relay.upload
    links |= {f"samplers.{pool.name}.download": pool.download for pool in spec.samplers}
    return (
        *lengths,
        learner_mfu(spec),
        *_hardware(spec.learner.hardware, "learner.hardware", "peak_flops"),
        *_islands(spec),
        *(entry for pool in spec.samplers for entry in _pool(pool, spec)),
        *filter(None, [check]),
        Assumed("publishing", PUBLISH_BYTES_S, "bytes/s", OURS),
        *(loading if spec.samplers else ()),
        *deltas,
        *(
            Assumed("link", rate, "bits/s", path)
            for path, rate in links.items()
            if rate is not None
        ),
    )


def _pool(pool: SamplerPool, spec: RunSpec) -> Iterator[Assumed]:
    path = f"samplers.{pool.name}"
    if pool.tokens_per_s is not None:
        yield Assumed(
            f"a replica of {pool.name}", pool.tokens_per_s, "tokens/s", f"{path}.tokens_per_s"
        )
    else:
        yield sampler_bandwidth(spec)
        yield sampler_mfu(spec)
        yield from _hardware(pool.hardware, f"{path}.hardware", "memory_bandwidth", "peak_flops")
    if device_of(pool.hardware).memory is not None:
        yield Assumed("vLLM's share of memory", MEMORY_UTILIZATION, "share", "vLLM 0.32's default")


def _islands(spec: RunSpec) -> Iterator[Assumed]:
    for member in members(spec):
        path = f"learner.islands.members.{member.name}"
        if member.hardware is not None:
            yield from _hardware(member.hardware, f"{path}.hardware", "peak_flops")
        for field, rate in (("upload", member.upload), ("download", member.download)):
            if rate is not None:
                yield Assumed("link", rate, "bits/s", f"{path}.{field}")
        if member.latency is not None:
            yield Assumed("latency", member.latency, "s", f"{path}.latency")
    if members(spec):
        yield Assumed("making and reading shares", SHARE_BYTES_S, "bytes/s", OURS)
        yield Assumed("exchange of shares", ROUND_TRIPS, "round trips", OURS)
        yield Assumed("report", REPORT_TRIPS, "round trips", OURS)


_FIELDS = {"peak_flops": ("peak", "FLOP/s"), "memory_bandwidth": ("bandwidth", "bytes/s")}


def _hardware(hardware: Hardware, path: str, *fields: str) -> Iterator[Assumed]:
    device = device_of(hardware)
    for field in fields:
        value = getattr(device, field)
        if value is not None:
            said = getattr(hardware, field) is not None
            source = f"{path}.{field}" if said else f"table of {hardware.kind}"
            name, unit = _FIELDS[field]
            yield Assumed(f"{hardware.kind} {name}", value, unit, source)


@dataclass(frozen=True)
class Cost:
    """Cost in the currency of `price_per_hour`."""

    per_hour: float
    by_role: dict[str, float]
    """Cost an hour of `learner`, islands, the pools by name, and `validators`; only those with a
    price."""
    run: float | None
    """Cost of all steps; None if their time is unknown."""


def hourly_price(spec: RunSpec) -> float | None:
    """Return the sum of devices times `price_per_hour`; see `cost`."""
    found = cost(spec, None)
    return None if found is None else found.per_hour


def cost(spec: RunSpec, run_s: float | None) -> Cost | None:
    """Return the cost of an hour and of the whole run; None if nothing has a price.

    An hour costs the devices of learner, islands, pools x replicas and validators, times
    `price_per_hour`. Hardware without a price costs nothing. Hardware without a count has one
    device.

    Args:
        spec: names hardware, prices, replicas.
        run_s: seconds of all steps, if known.
    """
    learners = {"learner": spec.learner}
    learners |= {island_role(n): island_spec(spec, n).learner for n in island_names(spec)[1:]}
    used: list[tuple[str, Hardware | None, int, int]] = [
        *((role, own.hardware, 1, own.mesh.slices) for role, own in learners.items()),
        *((pool.name, pool.hardware, pool.replicas, 1) for pool in spec.samplers),
        ("validators", spec.verify.hardware, spec.verify.validators, 1),
    ]
    by_role = {
        role: hardware.price_per_hour * (device_count(hardware, slices) or 1) * processes
        for role, hardware, processes, slices in used
        if hardware is not None and hardware.price_per_hour is not None
    }
    if not by_role:
        return None
    per_hour = sum(by_role.values())
    return Cost(per_hour, by_role, None if run_s is None else per_hour * run_s / 3600)
