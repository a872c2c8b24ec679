"""Estimates the speed of the roles: decoding, prefill, the learner's step, and a whole step.

Decoding follows a roofline: one engine step gives each of b sequences a token and takes

    max( (W + b c k) / (s B), 2 N' b / (t m P) )

where W is the bytes of weights and k the bytes of one token's keys and values on one device, c the
mean context, B the memory bandwidth, s the share of it that is reached, N' the parameters in
matrices, t the devices, P their peak FLOP/s, and m the share of it that is reached. Prefill is the
second term alone. Measured speeds (`tokens_per_s` of a pool and of the validators) replace both.

The learner takes (useful + old + reference + held-out FLOPs) / (devices x P x mfu), at the mean
length. The mfu already counts the time that remat takes (`runspec.core.models.flops`). Islands
exchange shares besides (`runspec.estimate.islands`).

A whole step takes at least

    step_s = max( learner_s, sampling_s )
    sampling_s = R n / sum over pools of replicas x tokens/s

for R rollouts of n output tokens. Each role counts as always busy, and versions travel in no time.
`runspec.plan.estimate` simulates the waits. A step of `pretrain` and `sft` takes `learner_s`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from runspec.core.models.config import ModelConfig
from runspec.core.models.flops import forward_flops, matrix_parameters, step_flops
from runspec.core.models.hardware import device_count, device_of
from runspec.core.models.memory import MAX_SEQUENCES, kv_token_bytes
from runspec.core.spec.islands import island_names, island_spec
from runspec.core.spec.schema import Hardware, RunSpec, SamplerPool
from runspec.estimate import assumed
from runspec.estimate.islands import exchange
from runspec.estimate.sampler import lease_groups, sampler_memory, weight_bytes


@dataclass(frozen=True)
class Decode:
    """Speed of one replica."""

    weights_s: float
    """Seconds to read the weights once: the least time of an engine step."""
    context_s: float
    """Seconds to read the keys and values of one token."""
    token_s: float
    """Seconds for the FLOPs of one token."""
    sequences: int
    """Sequences that are decoded at a time."""
    measured: float | None = None
    """Measured output tokens/s; it replaces the other figures."""
    copies: int = 1
    """Copies of the model that share the sequences. The other figures are for one copy."""

    def lease_seconds(self, lengths: Sequence[float], prompt: float) -> float:
        """Return the seconds to sample a lease.

        Sequences start together and each ends at its own length.

        Args:
            lengths: output tokens of each sequence.
            prompt: tokens of each prompt.
        """
        if self.measured is not None:
            return sum(lengths) / self.measured
        lengths = lengths[:: self.copies]
        seconds = len(lengths) * prompt * self.token_s
        for start in range(0, len(lengths), self.sequences):
            wave = sorted(lengths[start : start + self.sequences])
            done = 0.0
            for index, length in enumerate(wave):
                running, steps = len(wave) - index, length - done
                read = self.weights_s + running * (prompt + done + steps / 2) * self.context_s
                seconds += steps * max(read, running * self.token_s)
                done = length
        return seconds

    def tokens_per_s(self, lengths: Sequence[float], prompt: float) -> float:
        """Return the output tokens/s while a lease of these lengths is sampled."""
        return sum(lengths) / self.lease_seconds(lengths, prompt)


def decode_speed(pool: SamplerPool, spec: RunSpec, config: ModelConfig | None) -> Decode | None:
    """Return the speed of one replica of a pool; None if its hardware is unknown.

    Args:
        pool: a pool of the spec.
        spec: the spec of the run.
        config: shape of the model, if known.
    """
    if pool.tokens_per_s is not None:
        return Decode(0.0, 0.0, 0.0, MAX_SEQUENCES, pool.tokens_per_s)
    device = device_of(pool.hardware)
    if config is None or device.memory_bandwidth is None or device.peak_flops is None:
        return None
    bandwidth = device.memory_bandwidth * assumed.sampler_bandwidth(spec).value
    flops = pool.parallel.tensor * device.peak_flops * assumed.sampler_mfu(spec).value
    fit = sampler_memory(pool, spec, config).kv_tokens
    context = assumed.mean_prompt_tokens(spec).value + assumed.mean_new_tokens(spec).value
    sequences = MAX_SEQUENCES if fit is None else min(MAX_SEQUENCES, int(fit // context))
    return Decode(
        weights_s=weight_bytes(pool, config) / bandwidth,
        context_s=kv_token_bytes(pool, config) / bandwidth,
        token_s=2.0 * matrix_parameters(config) / flops,
        sequences=max(1, sequences),
        copies=pool.parallel.data,
    )


def validator_tokens_per_s(spec: RunSpec, config: ModelConfig | None) -> float | None:
    """Return the tokens/s that one validator prefills; None if its hardware is unknown."""
    if spec.verify.tokens_per_s is not None:
        return spec.verify.tokens_per_s
    if spec.verify.hardware is None or config is None:
        return None
    return prefill_tokens_per_s(spec.verify.hardware, spec, config)


def prefill_tokens_per_s(hardware: Hardware, spec: RunSpec, config: ModelConfig) -> float | None:
    """Return the tokens/s of forward passes over whole rollouts, on all devices of a replica."""
    peak, count = device_of(hardware).peak_flops, device_count(hardware)
    if peak is None or count is None:
        return None
    tokens = mean_tokens(spec)
    flops = forward_flops(config, [tokens]) / tokens
    return count * peak * assumed.sampler_mfu(spec).value / flops


def learner_seconds(spec: RunSpec, config: ModelConfig | None) -> float | None:
    """Return the seconds of one step on the learner; None if its peak is unknown.

    Of islands: the time of the slowest one's updates, and what the slowest exchange exposes.
    """
    islands = spec.learner.islands
    if islands is None:
        return _program_seconds(spec, config)
    computed = island_seconds(spec, config)
    known = {name: seconds for name, seconds in computed.items() if seconds is not None}
    if config is None or len(known) < len(computed):
        return None
    return max(known.values()) + exchange(spec, config).exposed_seconds(islands, known)


def island_seconds(spec: RunSpec, config: ModelConfig | None) -> dict[str, float | None]:
    """Return the seconds of each island's updates of one step; None where a peak is unknown."""
    return {name: _program_seconds(island_spec(spec, name), config) for name in island_names(spec)}


def _program_seconds(spec: RunSpec, config: ModelConfig | None) -> float | None:
    """Return the seconds of one step of one program; None if its peak is unknown."""
    peak = device_of(spec.learner.hardware).peak_flops
    devices = device_count(spec.learner.hardware, spec.learner.mesh.slices)
    if config is None or peak is None or devices is None:
        return None
    flops = step_flops(spec, config, mean_tokens(spec))
    return (flops.useful + flops.forward) / (devices * peak * assumed.learner_mfu(spec).value)


def mean_tokens(spec: RunSpec) -> float:
    """Return the mean tokens of a rollout, prompt and output, or of a document."""
    if spec.supervised is not None:
        return assumed.document_tokens(spec).value
    return assumed.mean_prompt_tokens(spec).value + assumed.mean_new_tokens(spec).value


def step_seconds(spec: RunSpec, config: ModelConfig | None) -> float | None:
    """Return the least seconds of a step; None if the learner's or a pool's speed is unknown.

    Args:
        spec: the spec of the run.
        config: shape of the model, if known.
    """
    if spec.supervised is not None:
        return learner_seconds(spec, config)
    learner, sampling = learner_seconds(spec, config), sampling_seconds(spec, config)
    return None if learner is None or sampling is None else max(learner, sampling)


def sampling_seconds(spec: RunSpec, config: ModelConfig | None) -> float | None:
    """Return the seconds of all pools for a step's rollouts; None if a speed is unknown or 0."""
    mean, prompt = assumed.mean_new_tokens(spec).value, assumed.mean_prompt_tokens(spec).value
    total = 0.0
    for pool in spec.samplers:
        speed = decode_speed(pool, spec, config)
        if speed is None:
            return None
        lease = lease_groups(pool, spec) * spec.grpo.group_size
        together = [mean] * min(lease, speed.sequences)
        seconds = speed.lease_seconds(together, prompt)
        if seconds <= 0.0:
            return None
        total += pool.replicas * sum(together) / seconds
    return rollouts_per_step(spec) * mean / total if total > 0.0 else None


def rollouts_per_step(spec: RunSpec) -> float:
    """Return the rollouts sampled and checked for a step, those of filtered groups included."""
    trained = spec.grpo.prompts_per_step * spec.grpo.group_size
    kept = 1.0 - assumed.filtered_share(spec).value
    most = trained * spec.grpo.fill.max_groups
    return min(trained / kept, most) if kept > 0.0 else most


def tokens_to_check(spec: RunSpec) -> float:
    """Return the tokens that validators prefill for a step."""
    return rollouts_per_step(spec) * mean_tokens(spec) * spec.verify.prefill_share
