"""Whether devices can sample for a pool, and how they divide the model: by what the model needs.

The pool's `hardware` is what its operator plans with. Whoever joins brings other devices: they fit
if vLLM's share of each one's memory holds its part of the weights, the activations, and keys and
values of one sequence of full length. `join`, `doctor` and `simulate` ask here; the coordinator
asks `runspec.core.models.not_accepted` alone, since it only hears what a worker says of itself.
"""

from __future__ import annotations

from dataclasses import dataclass

from runspec.core.errors import size
from runspec.core.models import ModelConfig, device_of, not_accepted
from runspec.core.models.parameters import MEMORY_UTILIZATION
from runspec.core.schema import Hardware, RunSpec, SamplerPool
from runspec.core.schema.samplers import Parallel
from runspec.estimate import assumed
from runspec.estimate.speed import decode_speed, sampler_memory

CAPABILITIES = {"bfloat16": 8.0, "fp8": 8.9}
"""Least CUDA compute capability for a type of a pool: below, vLLM refuses bfloat16, and multiplies
fp8 weights in another way, with other results."""


@dataclass(frozen=True)
class Devices:
    """Devices of one machine that are alike."""

    hardware: Hardware
    """Kind, count and memory."""
    capability: float | None = None
    """CUDA compute capability; None where it is not known, or the devices are no GPUs."""


@dataclass(frozen=True)
class Unfit:
    """Why devices cannot sample for a pool."""

    path: str
    """What of the spec they do not meet."""
    reason: str


def fitted(
    pool: SamplerPool, spec: RunSpec, config: ModelConfig | None, devices: Devices
) -> SamplerPool | Unfit:
    """Return a pool as a machine's devices would serve it, or why they cannot.

    Of all numbers of ranks that divide the model's heads, it has the one by which all devices
    together give most tokens/s; the fewest that fit, where the devices' speed is not known. The
    devices then hold as many copies of the model as they can (`parallel.data`).

    Args:
        pool: of the spec.
        spec: of the run.
        config: shape of the model; None: the pool's own ranks are taken, and memory is not checked.
        devices: not CPUs.
    """
    hardware, place = devices.hardware, f"samplers.{pool.name}"
    count, memory = hardware.count or 0, device_of(hardware).memory
    if reason := not_accepted(pool, hardware.kind, memory):
        return Unfit(f"{place}.accepts", reason)
    kind = pool.quantization or pool.dtype
    least = CAPABILITIES.get(kind)
    if least is not None and devices.capability is not None and devices.capability < least:
        reason = f"{kind} needs compute capability {least}; {hardware.kind} has"
        return Unfit(f"{place}.dtype", f"{reason} {devices.capability}")
    heads = 1 if config is None else config.num_attention_heads
    ranks = [n for n in range(1, count + 1) if heads % n == 0 and _divide_kv(config, n)]
    if config is None:
        ranks = [pool.parallel.tensor] if pool.parallel.tensor <= count else []
    found, needed, best = None, 0.0, -1.0
    for tensor in ranks:
        parallel = Parallel(tensor=tensor, data=count // tensor)
        changed = {"hardware": hardware, "parallel": parallel, "tokens_per_s": None}
        one = pool.model_copy(update=changed)
        if config is not None and memory is not None:
            needed = least_memory(one, spec, config)
            if needed > memory:
                continue
        rate = _tokens_per_s(one, spec, config)
        if found is None or rate > best:
            found, best = one, rate
    if found is not None:
        return found
    if config is None or memory is None or not ranks:
        wanted = f"{pool.parallel.tensor} devices wanted"
        return Unfit(f"{place}.parallel.tensor", f"{wanted}, this machine has {count}")
    return Unfit(
        f"{place}.max_model_len",
        f"{size(needed)} of each of {ranks[-1]} devices for weights, activations, and keys and "
        f"values of one sequence of {pool.max_model_len} tokens; {hardware.kind} has "
        f"{size(memory)}, and there {'is' if count == 1 else 'are'} {count}",
    )


def least_memory(pool: SamplerPool, spec: RunSpec, config: ModelConfig) -> float:
    """Return the bytes that each device must have for one sequence of full length."""
    needed = sampler_memory(pool, spec, config)
    sequence = needed.kv_token * needed.sequence_tokens
    return (needed.weights + needed.activations + sequence) / MEMORY_UTILIZATION


def _divide_kv(config: ModelConfig | None, ranks: int) -> bool:
    """Whether key-value heads divide over ranks, or ranks over copies of them, as vLLM asks."""
    heads = 1 if config is None else config.num_key_value_heads
    return heads % ranks == 0 or ranks % heads == 0


def _tokens_per_s(pool: SamplerPool, spec: RunSpec, config: ModelConfig | None) -> float:
    """Return the output tokens/s of all copies; 0 where the devices' speed is not known."""
    decode = decode_speed(pool, spec, config)
    if decode is None:
        return 0.0
    lengths = [assumed.mean_new_tokens(spec).value] * decode.sequences * decode.copies
    return decode.tokens_per_s(lengths, assumed.mean_prompt_tokens(spec).value)
