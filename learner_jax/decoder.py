"""The decoder of Qwen2, Qwen3, Llama and Mistral.

Letters: B rows, T positions, D hidden size, H query heads, K key/value heads, h head size, F MLP
size, V vocabulary.
"""

from __future__ import annotations

from typing import Any

from flax import nnx
from jax import nn
from jaxtyping import Array, Float, Int

from learner_jax.attention import packed_attention
from learner_jax.attention.context import from_zigzag, to_zigzag
from learner_jax.attention.rows import Rows, attend_in_rows
from learner_jax.embedding import embed
from learner_jax.execution import Execution
from learner_jax.modules import Linear, RMSNorm, param, scan_layers, stacked
from learner_jax.rope import Rotation, rotate, rotation
from learner_jax.sharding import constrain
from runspec.core.models.config import ModelConfig
from runspec.core.models.decoder import OUTPUT_GAIN
from runspec.core.models.family import normal


class Attention(nnx.Module):
    """Causal attention of grouped heads inside the segments of packed rows."""

    def __init__(self, config: ModelConfig) -> None:
        width, eps, h = {"embed": config.hidden_size}, config.rms_norm_eps, config.head_dim
        heads = {"heads": config.num_attention_heads, "head_dim": h}
        kv_heads = {"kv_heads": config.num_key_value_heads, "head_dim": h}
        self.q = Linear(width, heads, bias=config.qkv_bias)
        self.k = Linear(width, kv_heads, bias=config.qkv_bias)
        self.v = Linear(width, kv_heads, bias=config.qkv_bias)
        self.o = Linear(heads, width, bias=config.output_bias, gain=OUTPUT_GAIN)
        self.q_norm = RMSNorm({"head_dim": h}, eps) if config.qk_norm else None
        self.k_norm = RMSNorm({"head_dim": h}, eps) if config.qk_norm else None

    def __call__(
        self,
        x: Float[Array, "B T D"],
        segment_ids: Int[Array, "B T"],
        turn: Rotation,
        execution: Execution,
        rows: Rows | None,
    ) -> Float[Array, "B T D"]:
        mesh = execution.mesh
        q, k = self.q(x, mesh), self.k(x, mesh)  # [B, T, H, h], [B, T, K, h]
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = rotate(q, turn), rotate(k, turn), self.v(x, mesh)
        if rows is None:
            mixed = packed_attention(q, k, v, segment_ids, execution)
        else:
            mixed = attend_in_rows(q, k, v, segment_ids, rows, execution)
        return self.o(mixed, mesh)


class Mlp(nnx.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, config: ModelConfig) -> None:
        width, inner = {"embed": config.hidden_size}, {"mlp": config.intermediate_size}
        self.gate = Linear(width, inner)
        self.up = Linear(width, inner)
        self.down = Linear(inner, width, gain=OUTPUT_GAIN)

    def __call__(self, x: Float[Array, "B T D"], execution: Execution) -> Float[Array, "B T D"]:
        mesh = execution.mesh
        gated = nn.silu(self.gate(x, mesh)) * self.up(x, mesh)  # [B, T, F]
        return self.down(gated, mesh)


class DecoderLayer(nnx.Module):
    """Attention and MLP, each after a norm and added to the residual stream."""

    def __init__(self, config: ModelConfig) -> None:
        width, eps = {"norm": config.hidden_size}, config.rms_norm_eps
        self.attn_norm = RMSNorm(width, eps)
        self.attention = Attention(config)
        self.mlp_norm = RMSNorm(width, eps)
        self.mlp = Mlp(config)

    def __call__(
        self,
        x: Float[Array, "B T D"],
        segment_ids: Int[Array, "B T"],
        turn: Rotation,
        execution: Execution,
        rows: Rows | None,
    ) -> Float[Array, "B T D"]:
        mesh = execution.mesh
        x = x + self.attention(self.attn_norm(x), segment_ids, turn, execution, rows)
        x = constrain(x, mesh, "batch", "sequence", None)
        x = x + self.mlp(self.mlp_norm(x), execution)
        return constrain(x, mesh, "batch", "sequence", None)


class Decoder(nnx.Module):
    """Embedding, layers and last norm; the output head, tied or of its own."""

    layer: type[Any] = DecoderLayer
    """The class of its layers, of config: another family may have another."""

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        width, vocabulary = config.hidden_size, config.vocab_size
        self.embed = param(normal(width), {"vocab": vocabulary, "embed": width})
        self.layers = stacked(self.layer(config), config.num_hidden_layers)
        self.final_norm = RMSNorm({"norm": width}, config.rms_norm_eps)
        tied = config.tie_word_embeddings
        self.head = None if tied else param(normal(width), {"embed": width, "vocab": vocabulary})

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        segment_ids: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        execution: Execution,
        rows: Rows | None = None,
    ) -> Float[Array, "B T D"]:
        """See `model.Policy`."""
        mesh = execution.mesh
        # Under context parallelism the columns are in another order in here, and nowhere else.
        tokens, segment_ids, positions = (
            to_zigzag(x, mesh) for x in (tokens, segment_ids, positions)
        )
        x = embed(self.embed[...], tokens, execution)  # [B, T, D]
        x = constrain(x, mesh, "batch", "sequence", None)
        turn = rotation(positions, self.config)
        x = scan_layers(
            self.layers,
            lambda layer, x: layer(x, segment_ids, turn, execution, rows),
            x,
            execution,
        )
        return from_zigzag(self.final_norm(x), mesh)

    def head_weight(self) -> Float[Array, "D V"]:
        """See `model.Policy`."""
        return self.embed[...].T if self.head is None else self.head[...]
