"""AdamW on float32 masters, the gradient clipped by its global norm."""

from __future__ import annotations

import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

from runspec.spec.schema import Optimizer


def learning_rate(lr: float, warmup_updates: int) -> optax.Schedule:
    """lr * min(1, (n + 1) / warmup_updates) for update n = 0, 1, ...: linear, then constant."""

    def schedule(count: Int[Array, ""]) -> Float[Array, ""]:
        return lr * jnp.minimum(1.0, (count + 1) / max(warmup_updates, 1))

    return schedule


def make_optimizer(spec: Optimizer) -> optax.GradientTransformation:
    """Clip by global norm, then AdamW; weight decay, where not 0, decays every parameter.

    The norm before clipping is `optax.tree.norm` of the gradients that go in.
    """
    beta1, beta2 = spec.betas
    return optax.chain(
        optax.clip_by_global_norm(spec.clip_norm),
        optax.adamw(
            learning_rate(spec.lr, spec.warmup_updates),
            b1=beta1,
            b2=beta2,
            eps=spec.eps,
            weight_decay=spec.weight_decay,
        ),
    )
