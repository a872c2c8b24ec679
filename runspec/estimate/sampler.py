"""Memory of a sampler's device: weights, activations, and the room for the KV cache.

    room = utilization x memory - weights - activations
    KV bytes a token and device = 2 L ceil(K / t) h b

with L layers, K key-value heads of size h, b bytes of a number, and t tensor-parallel ranks. With
more than K ranks vLLM keeps a copy of each head on t / K of them.
"""

from __future__ import annotations

from dataclasses import dataclass

from runspec.core.models.config import ModelConfig
from runspec.core.models.hardware import device_of
from runspec.core.models.memory import (
    MAX_SEQUENCES,
    MEMORY_UTILIZATION,
    cpu_kv_bytes,
    kv_token_bytes,
)
from runspec.core.models.parameters import WIDTH, leaves, parameters
from runspec.core.spec.schema import RunSpec, SamplerPool

RECORDED_ROWS = 52
"""Hidden states of a sequence that `sampler.engine.recorder` keeps on the device: its ring, and the
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
    kv_token = kv_token_bytes(pool, config)
    weights = weight_bytes(pool, config)
    activations = _activations(config, ranks, width)
    memory = device_of(pool.hardware).memory
    room: float | None = None
    if pool.hardware.kind == "cpu":
        room = cpu_kv_bytes(pool, config)
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
    for leaf in leaves(parameters(config)):
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


def _activations(config: ModelConfig, ranks: int, width: int) -> float:
    """Return the bytes of a prefill's layer or of the last step's logits, whichever is larger.

    A layer holds residual, norm and output of D numbers a token, and gate, up and their product of
    F a token, sharded over the ranks. Logits are float32 and gathered: with the noise and a
    normalised copy they count three times.
    """
    layer = BATCHED_TOKENS * width * (3 * config.hidden_size + 3 * config.intermediate_size / ranks)
    logits = MAX_SEQUENCES * _FLOAT32 * 3 * config.vocab_size
    return float(max(layer, logits))
