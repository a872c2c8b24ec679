"""Device memory of KV cache, logits and prefill, for the engines and for the estimate."""

from __future__ import annotations

from runspec.core.models.config import ModelConfig
from runspec.core.models.parameters import WIDTH
from runspec.core.spec.schema import Learner, RunSpec, SamplerPool

MEMORY_UTILIZATION = 0.92
"""vLLM's default `gpu_memory_utilization`, version 0.32."""
MAX_SEQUENCES = 256
"""Most sequences that vLLM decodes at a time under `sampler.engine`."""
CPU_BLOCK_TOKENS = 32
"""Smallest KV block that vLLM's CPU attention runs well on; small blocks let a group share a short
prompt."""
CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Head sizes that vLLM's attention computes on CPUs: `get_supported_head_sizes` in
`vllm/v1/attention/backends/cpu_attn.py`, version 0.32."""
CPU_KV_BYTES = (64 << 20, 4 << 30)
"""Least and most bytes of the KV cache on a CPU."""
MAX_LOGITS = 2**29
"""Most logits of a chunk over all shards of the vocabulary: 2 GiB in float32."""
KEPT_LOGITS = 2**26
"""Most logits of a device that are kept for the backward pass: 256 MiB in float32."""
MIN_CHUNK, MAX_CHUNK = 512, 2048
"""Bounds of a chunk's positions. Each chunk reads and writes the head's gradient (D x V numbers)
once for chunk x D x V products; small chunks skip more positions without a target."""
PREFILL_FACTOR = 1.5
"""Memory of a version during prefill, relative to the size of its weights."""


def kv_token_bytes(pool: SamplerPool, config: ModelConfig) -> float:
    """Return the bytes of one token's keys and values on one device, in the pool's dtype."""
    heads = -(-config.num_key_value_heads // pool.parallel.tensor)
    return 2.0 * config.num_hidden_layers * heads * config.head_dim * WIDTH[pool.dtype]


def cpu_kv_bytes(pool: SamplerPool, config: ModelConfig) -> int:
    """Return the bytes of the KV cache on a CPU: room for all sequences, within CPU_KV_BYTES."""
    tokens = -(-pool.max_model_len // CPU_BLOCK_TOKENS) * CPU_BLOCK_TOKENS
    wanted = MAX_SEQUENCES * tokens * int(kv_token_bytes(pool, config))
    least, most = CPU_KV_BYTES
    return min(max(wanted, least), most)


def chunk_tokens(positions: int, vocab: int) -> int:
    """Return how many positions' logits a device computes at a time, a power of two.

    It is an eighth of `positions`, 512 to 2048; fewer if the vocabulary is above 262,144.
    """
    wanted = min(max(positions // 8, MIN_CHUNK), MAX_CHUNK, MAX_LOGITS // vocab)
    return 1 << (max(wanted, 1).bit_length() - 1)


def device_positions(learner: Learner) -> int:
    """Return the positions of a microbatch on one device.

    Rows are cut over data x fsdp, columns over context. Every device of a tensor group has the
    same positions.
    """
    mesh, packing = learner.mesh, learner.packing
    return packing.rows * packing.tokens // (mesh.data * mesh.fsdp * mesh.context)


def logits_chunk(learner: Learner, vocab: int) -> int:
    """Return the positions of a chunk: `learner.logits_chunk` if set, else `chunk_tokens`."""
    positions = device_positions(learner)
    return min(positions, learner.logits_chunk or chunk_tokens(positions, vocab))


def held_weights(spec: RunSpec) -> tuple[bool, bool]:
    """Return whether the learner holds a version's bits through a step, and those of version 0.

    The version's are for pi_old; version 0 is the reference policy or the base of adapters.
    """
    lora = spec.learner.lora is not None
    if spec.supervised is not None:
        return False, lora
    return spec.grpo.old_logprobs == "recompute", lora or spec.grpo.kl.coef > 0


def prefill_bytes(version: float, devices: int) -> float:
    """Return the memory that each of a validator's devices needs, in bytes.

        1.5 x version / devices

    Both engines divide a version evenly, JAX by parameters and torch by layers. The other half
    is for activations, logits and an uneven division.

    Args:
        version: bytes of the weights.
        devices: devices of one validator.
    """
    return PREFILL_FACTOR * version / devices
