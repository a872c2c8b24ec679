"""GRPO with the two-sided clip (INTELLECT-2, arXiv 2505.07291, section 4.1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from learner_jax.arrays import Data, LossInputs
from runspec.spec.schema import Algorithm, Clip

MAX_LOG_RATIO = 20.0


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LossMetrics:
    """Of one microbatch: scalars that `merge` joins over microbatches."""

    loss: Data
    """Normalised by N already: the microbatches' add up to the optimizer batch's."""
    policy_loss: Data
    """The surrogate's part of it."""
    kl: Data
    """Sum over output tokens; so are those below."""
    entropy: Data
    clipped_low: Data
    """Tokens whose gradient the lower clip stops: A < 0 and r < 1 - eps_low."""
    clipped_high: Data
    """A > 0 and r > 1 + eps_high."""
    clipped_delta: Data
    """A < 0 and r > delta: the second side."""
    drift: Data
    """|log pi_theta - log mu|."""
    tokens: Data
    """Output tokens."""
    ratio_max: Data
    """Largest r_t."""

    @staticmethod
    def zeros() -> LossMetrics:
        return LossMetrics(*(np.zeros((), np.float32) for _ in range(10)))

    def merge(self, other: LossMetrics) -> LossMetrics:
        sums = jax.tree.map(jnp.add, self, other)
        return LossMetrics(
            **{**vars(sums), "ratio_max": jnp.maximum(self.ratio_max, other.ratio_max)}
        )

    def means(self) -> dict[str, float]:
        """Host floats: `loss` and `policy_loss` as they are, the rest per output token."""
        values = {name: float(value) for name, value in vars(self).items()}
        tokens = max(values["tokens"], 1.0)
        return {
            "loss": values["loss"],
            "policy_loss": values["policy_loss"],
            "kl": values["kl"] / tokens,
            "entropy": values["entropy"] / tokens,
            "clip_fraction_low": values["clipped_low"] / tokens,
            "clip_fraction_high": values["clipped_high"] / tokens,
            "clip_fraction_delta": values["clipped_delta"] / tokens,
            "policy_drift": values["drift"] / tokens,
            "ratio_max": values["ratio_max"],
        }


def token_weights(
    output_lengths: Sequence[int],
    normalizer: Literal["sequence", "token", "constant"],
    *,
    max_new_tokens: int,
) -> list[float]:
    """mask_t / N: the weight of every output token of each sequence of one optimizer batch.

    Known before the first microbatch, so that no split into microbatches changes the gradient:

        sequence   1 / (S n_i): the mean of a sequence, then over the S sequences
        token      1 / sum_i n_i
        constant   1 / (S max_new_tokens)

    Args:
        output_lengths: n_i of the S sequences of the whole optimizer batch.
        normalizer: as above.
        max_new_tokens: longest output that sampling allows.
    """
    count, total = len(output_lengths), sum(output_lengths)
    if normalizer == "sequence":
        return [1.0 / (count * n) for n in output_lengths]
    if normalizer == "token":
        return [1.0 / total] * count
    return [1.0 / (count * max_new_tokens)] * count


def surrogate(
    ratio: Float[Array, ...], advantages: Float[Array, ...], clip: Clip
) -> Float[Array, ...]:
    """min( min(r, delta) A, clip(r, 1 - eps_low, 1 + eps_high) A ) per token.

    With A < 0 the plain clip has no bound for large r; delta is that bound.
    """
    clipped = jnp.clip(ratio, 1.0 - clip.eps_low, 1.0 + clip.eps_high)
    bounded = ratio if clip.delta is None else jnp.minimum(ratio, clip.delta)
    return jnp.minimum(bounded * advantages, clipped * advantages)


def k3(logprobs: Float[Array, ...], ref_logprobs: Float[Array, ...]) -> Float[Array, ...]:
    """exp(ref - cur) - (ref - cur) - 1 >= 0, an estimate of KL(cur || ref) with a gradient.

    The exponent is held at 20 as the ratio's is: beyond that only the linear part moves.
    """
    difference = ref_logprobs - logprobs
    return jnp.exp(jnp.minimum(difference, MAX_LOG_RATIO)) - difference - 1.0


def grpo_loss(
    logprobs: Float[Array, "B T"],
    entropy: Float[Array, "B T"],
    segment_ids: Int[Array, "B T"],
    inputs: LossInputs,
    algorithm: Algorithm,
) -> tuple[Float[Array, ""], LossMetrics]:
    """- (1/N) sum_t mask_t w_t surrogate_t + beta KL - c_H H, this microbatch's share of it.

        r_t = exp(clamp(log pi_theta(o_t) - log pi_old(o_t), -20, 20))
        w_t = min(pi_old(o_t) / mu(o_t), cap), or 1 where `importance.cap` is null

    KL and H are sums with the same mask and normaliser (`LossInputs.weights`).

    Args:
        logprobs: log pi_theta of the targets, at the temperature of sampling.
        entropy: of pi_theta at each position, at that temperature.
        segment_ids: 1, 2, ... for the samples of a row, 0 for padding.
        inputs: the rest, per position.
        algorithm: clip, kl, entropy_coef and importance of the spec.

    Raises:
        ValueError: `kl.coef` is not 0 and there are no log-probs of the reference policy.
    """
    if algorithm.kl.coef and inputs.ref_logprobs is None:
        raise ValueError("the KL term needs the reference policy's log-probs")
    on = inputs.weights > 0

    def kept(values: Array) -> Array:
        # Scores say something at every position; only output tokens may count, even in 0 * inf.
        return jnp.where(on, values, 0.0)

    logprobs, entropy = kept(logprobs), kept(entropy)
    old, sampler = kept(inputs.old_logprobs), kept(inputs.sampler_logprobs)
    ratio = jnp.exp(jnp.clip(logprobs - old, -MAX_LOG_RATIO, MAX_LOG_RATIO))
    gain = surrogate(ratio, inputs.advantages, algorithm.clip)
    if algorithm.importance.cap is not None:
        correction = jnp.exp(jnp.clip(old - sampler, -MAX_LOG_RATIO, MAX_LOG_RATIO))
        gain = gain * jnp.minimum(correction, algorithm.importance.cap)
    if inputs.ref_logprobs is None:
        kl = jnp.zeros_like(logprobs)
    else:
        kl = k3(logprobs, kept(inputs.ref_logprobs))
    policy_loss = -jnp.sum(inputs.weights * gain)
    penalty = algorithm.kl.coef * kl - algorithm.entropy_coef * entropy
    loss = policy_loss + jnp.sum(inputs.weights * penalty)

    def count(where: Array) -> Array:
        return jnp.sum(on & where, dtype=loss.dtype)

    negative = inputs.advantages < 0
    metrics = LossMetrics(
        loss=loss,
        policy_loss=policy_loss,
        kl=jnp.sum(kl),
        entropy=jnp.sum(entropy),
        clipped_low=count(negative & (ratio < 1.0 - algorithm.clip.eps_low)),
        clipped_high=count((inputs.advantages > 0) & (ratio > 1.0 + algorithm.clip.eps_high)),
        clipped_delta=count(negative & (ratio > (algorithm.clip.delta or jnp.inf))),
        drift=jnp.sum(jnp.abs(logprobs - sampler)),
        tokens=count(on),
        ratio_max=jnp.max(ratio, where=on, initial=0.0),
    )
    return loss, jax.lax.stop_gradient(metrics)
