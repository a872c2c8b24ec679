"""How fast the roles work: decoding, prefill, the learner's step.

Decoding, a roofline: one engine step gives each of b sequences in flight a token and takes

    max( (W + b c k) / (s B), 2 N' b / (t m P) )

W bytes of weights and k bytes of keys and values a token on one device, c the mean context, B its
memory bandwidth and s the share of it that is reached, N' the parameters in matrices, t devices,
P their peak FLOP/s, m the share of that. Prefill is the second term alone. What was measured
(`tokens_per_s` of a pool and of the validators) is taken instead.

The learner: (useful + old + reference FLOPs) / (devices x P x mfu); what remat computes again is
time that the mfu already counts (`estimate.flops`). It is the mean over lengths that it takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from runspec.core.models.config import ModelConfig
from runspec.core.models.flops import forward_flops, matrix_parameters, step_flops
from runspec.core.models.hardware import device_count, device_of
from runspec.core.models.memory import MAX_SEQUENCES, kv_token_bytes
from runspec.core.spec.schema import Hardware, RunSpec, SamplerPool
from runspec.estimate import assumed
from runspec.estimate.sampler import lease_groups, sampler_memory, weight_bytes


@dataclass(frozen=True)
class Decode:
    """One replica's speed."""

    weights_s: float
    """Reading the weights once: the least that an engine step takes."""
    context_s: float
    """Reading the keys and values of one token."""
    token_s: float
    """The FLOPs of one token."""
    sequences: int
    """That are decoded at a time."""
    measured: float | None = None
    """Output tokens/s; everything else is then of no account."""
    copies: int = 1
    """Of the model, among which the sequences are divided; what is above is of one."""

    def lease_seconds(self, lengths: Sequence[float], prompt: float) -> float:
        """Time to sample a lease; sequences start together and each ends at its own length.

        Args:
            lengths: output tokens of every sequence.
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
        """Output tokens/s while a lease of these lengths is sampled."""
        return sum(lengths) / self.lease_seconds(lengths, prompt)


def decode_speed(pool: SamplerPool, spec: RunSpec, config: ModelConfig | None) -> Decode | None:
    """Speed of one replica of a pool; None where neither the spec nor a table knows its hardware.

    Args:
        pool: of the spec.
        spec: the run.
        config: the model's shape, where it is known.
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
    """Tokens/s that one validator prefills; None where its hardware is not known."""
    if spec.verify.tokens_per_s is not None:
        return spec.verify.tokens_per_s
    if spec.verify.hardware is None or config is None:
        return None
    return prefill_tokens_per_s(spec.verify.hardware, spec, config)


def prefill_tokens_per_s(hardware: Hardware, spec: RunSpec, config: ModelConfig) -> float | None:
    """Tokens/s of forward passes over whole rollouts on all devices of one replica."""
    peak, count = device_of(hardware).peak_flops, device_count(hardware)
    if peak is None or count is None:
        return None
    tokens = mean_tokens(spec)
    flops = forward_flops(config, [tokens]) / tokens
    return count * peak * assumed.sampler_mfu(spec).value / flops


def learner_seconds(spec: RunSpec, config: ModelConfig | None) -> float | None:
    """Time of one rollout step on the learner's devices; None where their peak is not known."""
    peak = device_of(spec.learner.hardware).peak_flops
    devices = device_count(spec.learner.hardware, spec.learner.mesh.slices)
    if config is None or peak is None or devices is None:
        return None
    flops = step_flops(spec, config, mean_tokens(spec))
    work = flops.useful + flops.old + flops.reference
    return work / (devices * peak * assumed.learner_mfu(spec).value)


def mean_tokens(spec: RunSpec) -> float:
    """Of a rollout, prompt and output."""
    return assumed.mean_prompt_tokens(spec).value + assumed.mean_new_tokens(spec).value


def step_seconds(spec: RunSpec, config: ModelConfig | None) -> float | None:
    """The shortest that a step can be; None where the learner's or a pool's speed is not known.

    Args:
        spec: of the run.
        config: the model's shape, where it is known.
    """
    learner, sampling = learner_seconds(spec, config), sampling_seconds(spec, config)
    return None if learner is None or sampling is None else max(learner, sampling)


def sampling_seconds(spec: RunSpec, config: ModelConfig | None) -> float | None:
    """Time of all pools together for a step's rollouts; None where a speed is unknown, or nil."""
    mean, prompt = assumed.mean_new_tokens(spec).value, assumed.mean_prompt_tokens(spec).value
    total = 0.0
    for pool in spec.samplers:
        speed = decode_speed(pool, spec, config)
        if speed is None:
            return None
        lease = lease_groups(pool, spec) * spec.algorithm.group_size
        together = [mean] * min(lease, speed.sequences)
        seconds = speed.lease_seconds(together, prompt)
        if seconds <= 0.0:
            return None
        total += pool.replicas * sum(together) / seconds
    return rollouts_per_step(spec) * mean / total if total > 0.0 else None


def rollouts_per_step(spec: RunSpec) -> float:
    """Rollouts that are sampled and checked for a step, those of filtered groups included."""
    trained = spec.algorithm.prompts_per_step * spec.algorithm.group_size
    kept = 1.0 - assumed.filtered_share(spec).value
    most = trained * spec.algorithm.fill.max_groups
    return min(trained / kept, most) if kept > 0.0 else most


def tokens_to_check(spec: RunSpec) -> float:
    """Tokens that validators prefill for a step."""
    return rollouts_per_step(spec) * mean_tokens(spec) * spec.verify.prefill_share
