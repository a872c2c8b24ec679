"""What the loss takes of the reference's rollouts."""

from __future__ import annotations

import numpy as np

from learner_jax.loss import token_weights
from learner_jax.packing import LossInputs, Packed
from runspec.core.spec.schema import Grpo
from tests.learner_jax.reference import MAX_NEW_TOKENS, Rollout


def inputs_of(packed: Packed, rollouts: list[Rollout], algorithm: Grpo) -> LossInputs:
    """The inputs of all microbatches, float64."""
    lengths = [len(rollout.output) for rollout in rollouts]
    weights = token_weights(lengths, algorithm.loss_normalizer, max_new_tokens=MAX_NEW_TOKENS)
    return LossInputs(
        weights=packed.scatter([np.full(n, w) for n, w in zip(lengths, weights, strict=True)]),
        advantages=packed.scatter([np.full(len(r.output), r.advantage) for r in rollouts]),
        old_logprobs=packed.scatter([r.old for r in rollouts]),
        sampler_logprobs=packed.scatter([r.mu for r in rollouts]),
        ref_logprobs=packed.scatter([r.ref for r in rollouts]),
    )
