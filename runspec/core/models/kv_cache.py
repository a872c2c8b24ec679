"""How large the KV cache of a sampler is: for the engine that allocates it and the estimate."""

from __future__ import annotations

from runspec.core.models.config import ModelConfig
from runspec.core.models.parameters import WIDTH
from runspec.core.spec.schema import SamplerPool

MAX_SEQUENCES = 256
"""Sequences that `sampler.engine` lets vLLM decode at a time."""
CPU_BLOCK_TOKENS = 32
"""Smallest block that vLLM's CPU attention runs well on: a short prompt is shared in a group."""
CPU_KV_BYTES = (64 << 20, 4 << 30)
"""Least and most that the engine gives to keys and values on a CPU."""


def kv_token_bytes(pool: SamplerPool, config: ModelConfig) -> float:
    """Keys and values of one token on one device: they are kept in the pool's dtype."""
    heads = -(-config.num_key_value_heads // pool.parallel.tensor)
    return 2.0 * config.num_hidden_layers * heads * config.head_dim * WIDTH[pool.dtype]


def cpu_kv_bytes(pool: SamplerPool, config: ModelConfig) -> int:
    """What the engine gives to keys and values on a CPU: all its sequences, within limits."""
    tokens = -(-pool.max_model_len // CPU_BLOCK_TOKENS) * CPU_BLOCK_TOKENS
    wanted = MAX_SEQUENCES * tokens * int(kv_token_bytes(pool, config))
    least, most = CPU_KV_BYTES
    return min(max(wanted, least), most)
