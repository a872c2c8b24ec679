"""The policy loss: GRPO with the two-sided clip, and what else the spec's switches make of it.

Sources: GRPO (arXiv 2402.03300), two-sided clip (INTELLECT-2, 2505.07291, section 4.1), token
normaliser and uneven clip (DAPO, 2503.14476), constant normaliser (Dr. GRPO, 2503.20783), sequence
ratio (GSPO, 2507.18071), clipped weight (CISPO, 2506.13585).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from learner_jax.metrics import MAX_LOG_RATIO, LossMetrics, log_ratio_counts
from learner_jax.packing import LossInputs
from runspec.core.schema import Clip, Grpo


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
        output_lengths: n_i, the tokens that the policy sampled, of the S sequences of the batch.
        normalizer: as above.
        max_new_tokens: longest output that sampling allows.
    """
    count, total = len(output_lengths), sum(output_lengths)
    if normalizer == "sequence":
        return [1.0 / (count * n) for n in output_lengths]
    if normalizer == "token":
        return [1.0 / total] * count
    return [1.0 / (count * max_new_tokens)] * count


def clip_surrogate(
    ratio: Float[Array, ...], advantages: Float[Array, ...], clip: Clip
) -> Float[Array, ...]:
    """min( min(r, delta) A, clip(r, 1 - eps_low, 1 + eps_high) A ) per token.

    With A < 0 the plain clip has no bound for large r; delta is that bound, infinite where null.
    """
    clipped = jnp.clip(ratio, 1.0 - clip.eps_low, 1.0 + clip.eps_high)
    bounded = ratio if clip.delta is None else jnp.minimum(ratio, clip.delta)
    return jnp.minimum(bounded * advantages, clipped * advantages)


def k3(logprobs: Float[Array, ...], ref_logprobs: Float[Array, ...]) -> Float[Array, ...]:
    """exp(ref - cur) - (ref - cur) - 1 >= 0: of KL(cur || ref) where cur drew the tokens.

    It has a gradient. The exponent is held at 20 as the ratio's is: beyond that only the linear
    part moves.
    """
    difference = ref_logprobs - logprobs
    return jnp.exp(jnp.minimum(difference, MAX_LOG_RATIO)) - difference - 1.0


def log_ratios(
    logprobs: Float[Array, "B T"],
    old_logprobs: Float[Array, "B T"],
    on: Bool[Array, "B T"],
    segment_ids: Int[Array, "B T"],
    level: Literal["token", "sequence"],
) -> Float[Array, "B T"]:
    """log r of each output token.

        token      clamp(log pi_theta(o_t) - log pi_old(o_t), -20, 20)
        sequence   clamp(mean of log pi_theta(o_u) - log pi_old(o_u) over the n output tokens o_u of
                   its sequence, -20, 20): log of s_i, the geometric mean, the same for each token

    Args:
        logprobs, old_logprobs: 0 where not `on`.
        on: positions that predict an output token.
        segment_ids: 1, 2, ... for the samples of a row, 0 for padding; no sample is split.
        level: as above.
    """
    difference = logprobs - old_logprobs
    if level == "sequence":
        lengths = segment_sums(on.astype(difference.dtype), segment_ids)
        difference = segment_sums(difference, segment_ids) / jnp.maximum(lengths, 1.0)
    return jnp.clip(difference, -MAX_LOG_RATIO, MAX_LOG_RATIO)


def grpo_loss(
    logprobs: Float[Array, "B T"],
    entropy: Float[Array, "B T"],
    segment_ids: Int[Array, "B T"],
    inputs: LossInputs,
    algorithm: Grpo,
) -> tuple[Float[Array, ""], LossMetrics]:
    """- (1/N) sum_t mask_t w_t surrogate_t + beta KL - c_H H, this microbatch's share of it.

        r_t          exp of `log_ratios`, by `ratio: token | sequence`
        surrogate_t  `clip`:  min( min(r_t, delta) A, clip(r_t, 1 - eps_low, 1 + eps_high) A )
                     `cispo`: sg(clip(r_t, 1 - eps_low, 1 + eps_high)) A log pi_theta(o_t)
        w_t          min(pi_old(o_t) / mu(o_t), cap), or 1 where `importance.cap` is null
        KL           mask_t / N (exp(ref - cur) - (ref - cur) - 1), summed: k3
        H            mask_t / N times the entropy at t, summed

    Args:
        logprobs: log pi_theta of the targets, at the temperature of sampling.
        entropy: of pi_theta at each position, at that temperature.
        segment_ids: 1, 2, ... for the samples of a row, 0 for padding.
        inputs: the rest, per position; its weights are mask_t / N (`token_weights`).
        algorithm: ratio, surrogate, clip, kl, entropy_coef and importance of the spec.

    Raises:
        ValueError: `kl.coef` is not 0 and there are no log-probs of the reference policy.
    """
    if algorithm.kl.coef and inputs.ref_logprobs is None:
        raise ValueError("the KL term needs the reference policy's log-probs")
    on, clip = inputs.weights > 0, algorithm.clip

    def kept(values: Array) -> Array:
        # Scores say something at every position; only output tokens may count, even in 0 * inf.
        return jnp.where(on, values, 0.0)

    logprobs, old = kept(logprobs), kept(inputs.old_logprobs)
    log_ratio = log_ratios(logprobs, old, on, segment_ids, algorithm.ratio)
    sampler, advantages = kept(inputs.sampler_logprobs), kept(inputs.advantages)
    entropy = kept(entropy)
    if inputs.ref_logprobs is None:
        kl = jnp.zeros_like(logprobs)
    else:
        kl = k3(logprobs, kept(inputs.ref_logprobs))
    ratio = jnp.exp(log_ratio)
    if algorithm.surrogate == "cispo":
        # The clip bounds the weight and stops no token's gradient; delta has no part in it.
        weight = jnp.clip(ratio, 1.0 - clip.eps_low, 1.0 + clip.eps_high)
        gain = jax.lax.stop_gradient(weight) * advantages * logprobs
    else:
        gain = clip_surrogate(ratio, advantages, clip)
    if algorithm.importance.cap is not None:
        correction = jnp.exp(jnp.clip(old - sampler, -MAX_LOG_RATIO, MAX_LOG_RATIO))
        gain = gain * jnp.minimum(correction, algorithm.importance.cap)
    penalty = algorithm.kl.coef * kl - algorithm.entropy_coef * entropy
    policy_loss = -jnp.sum(inputs.weights * gain)
    loss = policy_loss + jnp.sum(inputs.weights * penalty)
    finite = jnp.isfinite(penalty - gain)
    low, high, delta = _acting_bounds(ratio, advantages, algorithm)

    def count(where: Array) -> Array:
        return jnp.sum(on & where, dtype=jnp.int32)

    metrics = LossMetrics(
        loss=loss,
        policy_loss=policy_loss,
        kl=jnp.sum(kl),
        kl_sampler=jnp.sum(k3(sampler, logprobs)),
        kl_sampler_old=jnp.sum(k3(sampler, old)),
        drift=jnp.sum(logprobs - sampler),
        drift_abs=jnp.sum(jnp.abs(logprobs - sampler)),
        entropy=jnp.sum(entropy),
        clipped_low=count(low),
        clipped_high=count(high),
        clipped_delta=count(delta),
        nonfinite=count(~finite),
        tokens=count(on),
        ratio_max=jnp.max(ratio, where=on, initial=0.0),
        log_ratios=log_ratio_counts(log_ratio, on),
    )
    return loss, jax.lax.stop_gradient(metrics)


def _acting_bounds(ratio: Array, advantages: Array, algorithm: Grpo) -> tuple[Array, Array, Array]:
    """Where the lower, the upper and the second-side bound act, as `LossMetrics` counts them."""
    clip = algorithm.clip
    below, above = ratio < 1.0 - clip.eps_low, ratio > 1.0 + clip.eps_high
    if algorithm.surrogate == "cispo":
        return below, above, jnp.zeros_like(below)
    negative = advantages < 0
    beyond = ratio > (jnp.inf if clip.delta is None else clip.delta)
    return negative & below, (advantages > 0) & above, negative & beyond


def segment_sums(
    values: Float[Array, "B T"], segment_ids: Int[Array, "B T"]
) -> Float[Array, "B T"]:
    """Sum `values`, at every position, over the positions of its row that have its id.

    By doubling: after step k a position holds the sum over the nearest 2^k positions of its sample
    to the left, and to the right. log T steps over [B, T]: no scatter, no number of segments to be
    known beforehand, and no difference of long sums, in which a short sample would lose its digits.

    Args:
        values: [B, T].
        segment_ids: from 0; the positions of an id lie together, as packing puts them.
    """
    segment_ids = jnp.asarray(segment_ids)
    left = right = values
    distance = 1
    while distance < values.shape[1]:
        for_left = _from(segment_ids, -distance, fill=-1) == segment_ids
        for_right = _from(segment_ids, distance, fill=-1) == segment_ids
        left = left + jnp.where(for_left, _from(left, -distance, fill=0), 0)
        right = right + jnp.where(for_right, _from(right, distance, fill=0), 0)
        distance *= 2
    return left + right - values


def _from(x: Shaped[Array, "B T"], distance: int, *, fill: int) -> Shaped[Array, "B T"]:
    """Return `x` shifted: at position t its value at t + distance, `fill` beyond its ends."""
    return jax.lax.pad(x, jnp.asarray(fill, x.dtype), [(0, 0, 0), (-distance, distance, 0)])
