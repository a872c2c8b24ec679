"""The loss of supervised runs: cross entropy of packed documents, and a penalty on large logits.

    loss = sum_t w_t (-log p(o_t) + coef z_t^2),   sum_t w_t = 1 over an optimizer batch

z_t is the logsumexp of the logits at t (PaLM, arXiv 2204.02311) or their largest (METAGENE-1,
2501.02045).
"""

from __future__ import annotations

import operator
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from learner_jax.packing import Data, LossInputs
from runspec.core.schema import ZLoss


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DocumentMetrics:
    """Metrics of one microbatch, over all devices; float32 [] and int32 []."""

    loss: Data
    """Normalised already: the microbatches' add up to the optimizer batch's."""
    nll: Data
    """-log p in nats, summed over trained tokens, whatever their weight."""
    z: Data
    """z^2, summed over trained tokens; 0 where no penalty is asked for."""
    nonfinite: Data
    """Trained tokens whose part of the loss is not finite."""
    tokens: Data
    """Trained tokens."""

    @staticmethod
    def zeros() -> DocumentMetrics:
        wide = jax.dtypes.canonicalize_dtype(float)
        numbers = {name: np.zeros((), wide) for name in ("loss", "nll", "z")}
        counts = {name: np.zeros((), np.int32) for name in ("nonfinite", "tokens")}
        return DocumentMetrics(**numbers, **counts)

    def merge(self, other: DocumentMetrics) -> DocumentMetrics:
        """Merge two, on the device or, once fetched, on the host."""
        return jax.tree.map(operator.add, self, other)

    def means(self) -> dict[str, float]:
        """Host floats: `loss` as it is, `nonfinite_tokens` a count, the rest per trained token."""
        tokens = max(float(self.tokens), 1.0)
        return {
            "loss": float(self.loss),
            "nll": float(self.nll) / tokens,
            "z": float(self.z) / tokens,
            "nonfinite_tokens": float(self.nonfinite),
        }


def document_loss(
    logprobs: Float[Array, "B T"],
    level: Float[Array, "B T"] | None,
    inputs: LossInputs,
    z_loss: ZLoss,
) -> tuple[Float[Array, ""], DocumentMetrics]:
    """This microbatch's share of the loss.

    Args:
        logprobs: log p of the targets.
        level: z; None where `z_loss.coef` is 0.
        inputs: weights.
        z_loss: of the spec.
    """
    on = inputs.weights > 0
    nll = jnp.where(on, -logprobs, 0.0)
    squared = jnp.zeros_like(nll) if level is None else jnp.where(on, jnp.square(level), 0.0)
    each = nll + z_loss.coef * squared
    loss = jnp.sum(inputs.weights * each)
    metrics = DocumentMetrics(
        loss=loss,
        nll=jnp.sum(nll),
        z=jnp.sum(squared),
        nonfinite=jnp.sum(on & ~jnp.isfinite(each), dtype=jnp.int32),
        tokens=jnp.sum(on, dtype=jnp.int32),
    )
    return loss, jax.lax.stop_gradient(metrics)
