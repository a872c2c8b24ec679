"""What the loss says of its tokens: sums, counts and a histogram, which microbatches merge."""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from learner_jax.arrays import Data

MAX_LOG_RATIO = 20.0
"""log r is held within this of 0, and so is every exponent of a log-prob difference."""
QUANTILES = {"p01": 0.01, "p50": 0.5, "p99": 0.99}

_CENTRE = 1e-3
_HALF = 128
_STEP = math.asinh(MAX_LOG_RATIO / _CENTRE) / _HALF
LOG_RATIO_EDGES = _CENTRE * np.sinh((np.arange(-_HALF, _HALF) + 0.5) * _STEP)
"""Edges of the histogram of log r: even near 0, in equal factors further out. A bin is
max(8.3e-5, 8.3 % of |log r|) wide, which is how exactly the quantiles are known."""

_SUMS = ("kl", "kl_sampler", "kl_sampler_old", "drift", "drift_abs", "entropy")
_COUNTS = ("clipped_low", "clipped_high", "clipped_delta", "nonfinite", "tokens")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LossMetrics:
    """Of one microbatch, over all devices. float32 [] and int32 [] unless said otherwise."""

    loss: Data
    """Normalised by N already: the microbatches' add up to the optimizer batch's."""
    policy_loss: Data
    """The surrogate's part of it."""
    kl: Data
    """k3 of KL(pi_theta || reference), summed over output tokens; so are those below."""
    kl_sampler: Data
    """k3 of KL(mu || pi_theta): mu drew the tokens, so of this direction k3 is unbiased."""
    kl_sampler_old: Data
    """The same of KL(mu || pi_old): how stale the step began; 0 where pi_old is mu."""
    drift: Data
    """log pi_theta - log mu."""
    drift_abs: Data
    """|log pi_theta - log mu|."""
    entropy: Data
    clipped_low: Data
    """Tokens that the lower bound acts on. `clip`: A < 0 and r < 1 - eps_low, which stops the
    gradient; `cispo`: r < 1 - eps_low, which is the weight then."""
    clipped_high: Data
    """The upper bound. `clip`: A > 0 and r > 1 + eps_high; `cispo`: r > 1 + eps_high."""
    clipped_delta: Data
    """The second side of `clip`: A < 0 and r > delta."""
    nonfinite: Data
    """Output tokens whose part of the loss is not finite."""
    tokens: Data
    """Output tokens."""
    ratio_max: Data
    """Largest r_t."""
    log_ratios_below: Data
    """int32 [256]: output tokens with log r below each of `LOG_RATIO_EDGES`."""

    @staticmethod
    def zeros() -> LossMetrics:
        numbers = {name: np.zeros((), np.float32) for name in ("loss", "policy_loss", *_SUMS)}
        counts = {name: np.zeros((), np.int32) for name in _COUNTS}
        return LossMetrics(
            **numbers,
            **counts,
            ratio_max=np.zeros((), np.float32),
            log_ratios_below=np.zeros(len(LOG_RATIO_EDGES), np.int32),
        )

    def merge(self, other: LossMetrics) -> LossMetrics:
        sums = jax.tree.map(jnp.add, self, other)
        return LossMetrics(
            **{**vars(sums), "ratio_max": jnp.maximum(self.ratio_max, other.ratio_max)}
        )

    def means(self) -> dict[str, float]:
        """Host floats: `loss` and `policy_loss` as they are, `nonfinite_tokens` a count, ratios
        as they are, the rest per output token."""
        below = np.asarray(self.log_ratios_below, np.float64)
        tokens = max(float(self.tokens), 1.0)
        per_token = {name: float(getattr(self, name)) / tokens for name in (*_SUMS, *_COUNTS)}
        return {
            "loss": float(self.loss),
            "policy_loss": float(self.policy_loss),
            "kl": per_token["kl"],
            "kl_sampler": per_token["kl_sampler"],
            "kl_sampler_old": per_token["kl_sampler_old"],
            "policy_drift": per_token["drift_abs"],
            "policy_drift_signed": per_token["drift"],
            "entropy": per_token["entropy"],
            "clip_fraction_low": per_token["clipped_low"],
            "clip_fraction_high": per_token["clipped_high"],
            "clip_fraction_delta": per_token["clipped_delta"],
            "nonfinite_tokens": float(self.nonfinite),
            **{
                f"ratio_{name}": math.exp(np.interp(share * tokens, below, LOG_RATIO_EDGES))
                for name, share in QUANTILES.items()
            },
            "ratio_max": float(self.ratio_max),
        }


def log_ratios_below(
    log_ratio: Float[Array, "B T"], on: Bool[Array, "B T"]
) -> Int[Array, " edges"]:
    """How many of the values where `on` lie below each edge of `LOG_RATIO_EDGES`.

    Comparisons that XLA sums as it makes them: no scatter, and nothing of size B x T x edges.
    """
    edges = jnp.asarray(LOG_RATIO_EDGES, log_ratio.dtype)
    below = (log_ratio[..., None] < edges) & on[..., None]
    return jnp.sum(below, axis=(0, 1), dtype=jnp.int32)
