"""What the jitted programs take: arrays over the positions of packed rows.

Everything that belongs to output token t of a sample lies at the position that predicts it, P-1+t
of the sample, so that no program shifts anything.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax

Data = Any
"""numpy on the host, `jax.Array` on the mesh, `jax.ShapeDtypeStruct` before either exists."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TokenBatch:
    """Rows of packed samples, int32 [B, T] each; [M, B, T] for all microbatches of an update."""

    tokens: Data
    targets: Data
    """The output token that the position predicts; -1 where it predicts none."""
    segment_ids: Data
    """1, 2, ... for the samples of a row, 0 for padding."""
    positions: Data
    """Of each token in its sample, from 0."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LossInputs:
    """What the loss knows of each output token, float32, shaped as the tokens are; read where
    weights > 0."""

    weights: Data
    """mask_t / N, of `loss.token_weights`: 0 where the position predicts no output token."""
    advantages: Data
    old_logprobs: Data
    """log pi_old."""
    sampler_logprobs: Data
    """log mu, as the validator recomputed it."""
    ref_logprobs: Data | None
    """Of the reference policy; None where `kl.coef` is 0."""
