"""Assumptions of an estimate if the spec gives no figure, each with its source."""

from __future__ import annotations

from dataclasses import dataclass

from runspec.core.models.config import ModelConfig
from runspec.core.models.parameters import trained_count
from runspec.core.spec.schema import RunSpec

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
OURS = "runspec.estimate"
"""Source of a figure of this package, which no field of the spec gives."""
_SIGNIFICAND_BITS = {"float32": 24, "bfloat16": 8}


@dataclass(frozen=True)
class Assumed:
    """Input of an estimate."""

    name: str
    value: float
    unit: str
    source: str
    """Field of the spec, its derivation, or `runspec.estimate` for a figure of this package."""


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
    given = getattr(spec.estimate, field)
    if given is not None:
        return Assumed(field.replace("_", " "), given, unit, f"estimate.{field}")
    return Assumed(field.replace("_", " "), default, unit, source)
