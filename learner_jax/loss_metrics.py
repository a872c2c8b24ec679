"""Metrics of the loss: sums, counts and a histogram over tokens, merged over microbatches."""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from learner_jax.packing import Data

MAX_LOG_RATIO = 20.0
"""log r is held within this of 0, and so is every exponent of a log-prob difference."""
QUANTILES = {"p01": 0.01, "p50": 0.5, "p99": 0.99}

# The histogram of log r: bin k lies around 1e-4 sinh((k - 128) step), k = 1 .. 255 from -20 to 20,
# so that bins are even near 0 and grow with |log r| further out.
_ROOT = 16
_BINS = _ROOT * _ROOT
_CENTRE = 1e-4
_STEP = math.asinh(MAX_LOG_RATIO / _CENTRE) / (_BINS / 2 - 1)
_UPPER_EDGES = _CENTRE * np.sinh((np.arange(_BINS) - _BINS / 2 + 0.5) * _STEP)

_SUMS = ("kl", "kl_sampler", "kl_sampler_old", "drift", "drift_abs", "entropy")
_COUNTS = ("clipped_low", "clipped_high", "clipped_delta", "nonfinite", "tokens")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LossMetrics:
    """Metrics of one microbatch, over all devices; float32 [] and int32 [] by default."""

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
    log_ratios: Data
    """int32 [256], the histogram that `log_ratio_counts` makes."""

    @staticmethod
    def zeros() -> LossMetrics:
        wide = jax.dtypes.canonicalize_dtype(float)
        names = ("loss", "policy_loss", *_SUMS, "ratio_max")
        numbers = {name: np.zeros((), wide) for name in names}
        counts = {name: np.zeros((), np.int32) for name in _COUNTS}
        return LossMetrics(**numbers, **counts, log_ratios=np.zeros(_BINS, np.int32))

    def merge(self, other: LossMetrics) -> LossMetrics:
        """Merge two, on the device or, once fetched, on the host."""
        sums = jax.tree.map(operator.add, self, other)
        numpy = np if isinstance(self.ratio_max, np.ndarray | np.generic) else jnp
        return replace(sums, ratio_max=numpy.maximum(self.ratio_max, other.ratio_max))

    def means(self) -> dict[str, float]:
        """Host floats: `loss` and `policy_loss` as they are, `nonfinite_tokens` a count, ratios
        as they are, the rest per output token.

        `ratio_p01`, `_p50` and `_p99` are exp of quantiles of log r, which are known to within
        their bin of the histogram: to the larger of 2e-5 and 12 % of |log r|.
        """
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
                f"ratio_{name}": math.exp(log_ratio_quantile(self.log_ratios, share))
                for name, share in QUANTILES.items()
            },
            "ratio_max": float(self.ratio_max),
        }


def log_ratio_counts(log_ratio: Float[Array, "B T"], on: Bool[Array, "B T"]) -> Int[Array, " bins"]:
    """The histogram of the values where `on`; one that is not finite is in no bin.

    As a product of two matrices of zeros and ones, [16, B T] and [B T, 16]: no scatter, and 32
    numbers a token in place of 256.
    """
    finite = jnp.isfinite(log_ratio)
    place = jnp.round(jnp.arcsinh(jnp.where(finite, log_ratio, 0.0) / _CENTRE) / _STEP)
    bins = place.astype(jnp.int32) + _BINS // 2  # [B, T]
    digits = jnp.arange(_ROOT)
    high = (bins[..., None] // _ROOT == digits) & (on & finite)[..., None]  # [B, T, 16]
    low = bins[..., None] % _ROOT == digits  # [B, T, 16]
    counts = jnp.einsum(
        "bth,btl->hl",
        high.astype(jnp.bfloat16),
        low.astype(jnp.bfloat16),
        preferred_element_type=jnp.float32,  # exact up to 2^24 tokens a bin
    )
    return counts.reshape(_BINS).astype(jnp.int32)


def log_ratio_quantile(counts: Int[np.ndarray, " bins"], share: float) -> float:
    """The value below which that share of a histogram lies, evenly spread inside its bin; 0 where
    the histogram is empty."""
    below = np.cumsum(np.asarray(counts, np.int64))
    if below[-1] == 0:
        return 0.0
    k = int(np.searchsorted(below, share * below[-1]))
    inside = (share * below[-1] - (below[k] - counts[k])) / counts[k]
    lower, upper = _UPPER_EDGES[max(k - 1, 0)], _UPPER_EDGES[k]
    return float(lower + inside * (upper - lower))
