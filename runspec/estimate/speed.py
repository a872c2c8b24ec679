"""Estimates speeds of the roles, decoding to whole step, and the memory of a sampler's device.

Decoding follows a roofline: one engine step gives each of b sequences a token and takes

    max( (W + b c k) / (s B), 2 N' b / (t m P) )

where W is the bytes of weights and k the bytes of one token's keys and values on one device, c the
mean context, B the memory bandwidth, s the share of it that is reached, N' the parameters in
matrices, t the devices, P their peak FLOP/s, and m the share of it that is reached. Prefill is the
second term alone. Measured speeds (`tokens_per_s` of a pool and of the validators) replace both.

The learner takes (useful + old + reference + held-out FLOPs) / (devices x P x mfu), at the mean
length. The mfu already counts the time that remat takes (`runspec.core.models.parameters`). Islands
exchange shares besides (`runspec.estimate.broadcast`).

A whole step takes at least

    step_s = max( learner_s, sampling_s )
    sampling_s = R n / sum over pools of replicas x tokens/s

for R rollouts of n output tokens. Each role counts as always busy, and versions travel in no time.
`runspec.plan.estimate` simulates the waits. A step of `pretrain` and `sft` takes `learner_s`.

Memory of a sampler's device: weights, activations, and the room for the KV cache.

    room = utilization x memory - weights - activations
    KV bytes a token and device = 2 L ceil(K / t) h b

with L layers, K key-value heads of size h, b bytes of a number, and t tensor-parallel ranks. With
more than K ranks vLLM keeps a copy of each head on t / K of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from runspec.core.models import ModelConfig, device_count, device_of
from runspec.core.models import parameters as model
from runspec.core.models.parameters import MAX_SEQUENCES, MEMORY_UTILIZATION, WIDTH
from runspec.core.schema import Hardware, RunSpec, SamplerPool
from runspec.core.schema.role_names import island_names, island_spec
from runspec.estimate import assumed, state_bytes
from runspec.estimate.broadcast import exchange


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
        context_s=model.kv_token_bytes(pool, config) / bandwidth,
        token_s=2.0 * model.matrix_parameters(config) / flops,
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
    flops = model.forward_flops(config, [tokens]) / tokens
    return count * peak * assumed.sampler_mfu(spec).value / flops


def check_tokens_per_s(spec: RunSpec, config: ModelConfig | None) -> assumed.Assumed | None:
    """Return a validator's rate; without `verify.hardware`, that of a replica of the first pool.

    None if that is unknown too, or if there are no validators.
    """
    verify, source = spec.verify, "verify.hardware"
    if not verify.validators:
        return None
    rate, hardware = validator_tokens_per_s(spec, config), verify.hardware
    if verify.tokens_per_s is not None:
        source = "verify.tokens_per_s"
    elif hardware is None and config is not None:
        rate = prefill_tokens_per_s(spec.samplers[0].hardware, spec, config)
        source = f"no verify.hardware: as a replica of {spec.samplers[0].name}"
    return None if rate is None else assumed.Assumed("a validator", rate, "tokens/s", source)


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
    flops = model.step_flops(spec, config, mean_tokens(spec))
    return (flops.useful + flops.forward) / (devices * peak * assumed.learner_mfu(spec).value)


def corpus_seconds(spec: RunSpec) -> float:
    """Return the seconds in which as many tokens as a supervised run trains become a corpus."""
    assert spec.supervised is not None
    step = spec.supervised.updates_per_step * spec.supervised.tokens_per_update
    return spec.steps * step / assumed.corpus_rate(spec).value


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
    learner_s = learner_seconds(spec, config)
    if spec.supervised is not None or learner_s is None:
        return learner_s
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
    return max(learner_s, rollouts_per_step(spec) * mean / total) if total > 0.0 else None


def rollouts_per_step(spec: RunSpec) -> float:
    """Return the rollouts sampled and checked for a step, those of filtered groups included."""
    trained = spec.grpo.prompts_per_step * spec.grpo.group_size
    kept = 1.0 - assumed.filtered_share(spec).value
    most = trained * spec.grpo.fill.max_groups
    return min(trained / kept, most) if kept > 0.0 else most


def published_states_bytes(spec: RunSpec, config: ModelConfig) -> int:
    """Return about the bytes that `audit` keeps in the store: states, and what they trained on.

    A rollout of n tokens has 860 + 12 n + 258 ceil(n / 32) bytes in submission, verdict, envelopes
    and archive (measured: target_short with profile laptop). Documents are published once.
    """
    if spec.audit is None:
        return 0
    states = -(-spec.steps // spec.audit.states)
    states = min(states, spec.audit.keep or states)
    records = 0.0
    if spec.supervised is None:
        mean = assumed.mean_new_tokens(spec).value
        rollout = 860 + 12 * mean + 258 * -(-mean // 32)
        records = rollouts_per_step(spec) * rollout * min(spec.steps, states * spec.audit.states)
    return round(states * state_bytes(spec, config) + records)


def tokens_to_check(spec: RunSpec) -> float:
    """Return the tokens that validators prefill for a step."""
    return rollouts_per_step(spec) * mean_tokens(spec) * spec.verify.prefill_share


RECORDED_ROWS = 52
"""Hidden states of a sequence that `sampler.engine.sampling` keeps on the device: its ring, and the
buffers of the last steps."""
BATCHED_TOKENS = 2048
"""Tokens of one forward pass: vLLM's default `max_num_batched_tokens`."""
_FLOAT32 = 4


@dataclass(frozen=True)
class SamplerMemory:
    """Bytes on one device of a replica."""

    memory: float | None
    """Memory of the device; None if unknown."""
    weights: float
    activations: float
    """Largest temporary arrays: of a prefill, or of the logits of every sequence."""
    kv_token: float
    """Bytes of one token's keys and values."""
    room: float | None
    """Bytes for keys and values; if negative, the weights do not fit."""
    captured: float
    """Bytes that the first rank keeps for proofs of the sequences in flight, beside vLLM's memory:
    the last hidden states of each, its tokens and log-probs."""
    sequence_tokens: int
    """`max_model_len`."""

    @property
    def spare(self) -> float | None:
        """Bytes of the device's memory that vLLM leaves free."""
        return None if self.memory is None else (1.0 - MEMORY_UTILIZATION) * self.memory

    @property
    def kv_tokens(self) -> int | None:
        """Tokens whose keys and values fit, for a replica as for each of its devices."""
        return None if self.room is None else max(0, int(self.room // self.kv_token))

    @property
    def full_sequences(self) -> float | None:
        """Sequences of full length that fit at a time; at most what the engine decodes at once."""
        if self.kv_tokens is None:
            return None
        return min(self.kv_tokens / self.sequence_tokens, float(MAX_SEQUENCES))


def sampler_memory(pool: SamplerPool, spec: RunSpec, config: ModelConfig) -> SamplerMemory:
    """Return the memory of one device of a replica of a pool.

    On a CPU the engine sizes keys and values itself, within `CPU_KV_BYTES`.

    Args:
        pool: a pool of the spec.
        spec: spec of the run.
        config: shape of the model.
    """
    ranks, width = pool.parallel.tensor, WIDTH[pool.dtype]
    kv_token = model.kv_token_bytes(pool, config)
    weights = weight_bytes(pool, config)
    # A layer of a prefill holds residual, norm and output of D numbers a token, and gate, up and
    # their product of F a token, sharded over the ranks. The last step's logits are float32 and
    # gathered: with the noise and a normalised copy they count three times.
    features = 3 * config.hidden_size + 3 * config.intermediate_size / ranks
    logits = MAX_SEQUENCES * _FLOAT32 * 3 * config.vocab_size
    activations = float(max(BATCHED_TOKENS * width * features, logits))
    memory = device_of(pool.hardware).memory
    room: float | None = None
    if pool.hardware.kind == "cpu":
        room = model.cpu_kv_bytes(pool, config)
    elif memory is not None:
        room = MEMORY_UTILIZATION * memory - weights - activations
    rows = RECORDED_ROWS * config.hidden_size * WIDTH["bfloat16"]
    captured = float(MAX_SEQUENCES * (rows + pool.max_new_tokens * 2 * _FLOAT32))
    return SamplerMemory(memory, weights, activations, kv_token, room, captured, pool.max_model_len)


def lease_groups(pool: SamplerPool, spec: RunSpec) -> int:
    """Return the groups of one lease, at most those of a step."""
    return min(pool.groups_per_submission, spec.grpo.prompts_per_step)


def weight_bytes(pool: SamplerPool, config: ModelConfig) -> float:
    """Return the bytes of weights on one device, as vLLM shards and quantises them.

    Matrices, the embedding and the head are sharded over the ranks (k and v at most into heads),
    norms are not. `fp8` applies to the layers' matrices, with one scale each; embedding and head
    keep the pool's dtype.
    """
    ranks, width = pool.parallel.tensor, WIDTH[pool.dtype]
    copies = -(-config.num_key_value_heads // ranks) / config.num_key_value_heads
    total = 0.0
    for leaf in model.leaves(model.parameters(config)):
        share = 1.0
        if "kv_heads" in leaf.axes:
            share = copies
        elif {"heads", "mlp", "vocab"} & set(leaf.axes):
            share = 1 / ranks
        if pool.quantization == "fp8" and {"layers", "embed"} <= set(leaf.axes):
            total += leaf.size * share + _FLOAT32 * config.num_hidden_layers
        else:
            total += width * leaf.size * share
    return total
