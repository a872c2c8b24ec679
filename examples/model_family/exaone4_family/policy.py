"""The decoder of EXAONE 4.0: what `learner_jax` brings, in another order."""

from __future__ import annotations

from flax import nnx
from jaxtyping import Array, Float, Int

from learner_jax.decoder import Attention, Decoder, Mlp, Rotation
from learner_jax.model import RMSNorm
from learner_jax.packing import Rows, Spans
from learner_jax.sharding import Execution, constrain
from runspec.core.models import ModelConfig


class Layer(nnx.Module):
    """x + norm(attention(x)), then x + norm(mlp(x))."""

    def __init__(self, config: ModelConfig) -> None:
        width, eps = {"norm": config.hidden_size}, config.rms_norm_eps
        self.attention, self.after_attention = Attention(config), RMSNorm(width, eps)
        self.mlp, self.after_mlp = Mlp(config), RMSNorm(width, eps)

    def __call__(
        self,
        x: Float[Array, "B T D"],
        segment_ids: Int[Array, "B T"],
        turn: Rotation,
        execution: Execution,
        shared: Rows | Spans | None,
    ) -> Float[Array, "B T D"]:
        mixed = self.attention(x, segment_ids, turn, execution, shared)
        x = constrain(x + self.after_attention(mixed), execution.mesh, "batch", "sequence", None)
        x = x + self.after_mlp(self.mlp(x, execution))
        return constrain(x, execution.mesh, "batch", "sequence", None)


class Exaone4(Decoder):
    """Embedding, layers with norms after their parts, last norm and head."""

    layer = Layer
