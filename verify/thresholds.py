"""Limits of the checks, by the precisions that sampler and validator compute in.

The figures come from measurements (`docs/verify.md`). They lie between the values of honest
rollouts of a pair of precisions and the values of the attacks, nearer to the former. A profile that
was measured for a pool (`verify.calibration`) replaces them, and the spec's `verify.thresholds`
replaces both.

`GapNoise` limits how far rounding may move the seeded choice: a budget of gaps for each token,
which falls with the number of tokens. The gap g_t of a token (`seeded_sampling`) is 0 unless
rounding changed the choice. It counts up to a cap, x_t = min(g_t, cap). The one assumption is:
given prompt and tokens before, honest x_t have means that are mu at most on average over the tokens
of a submission. exp is convex, so for theta > 0, whatever the distribution is,

    E exp(theta x_t) <= 1 + mu_t (exp(theta cap) - 1) / cap <= exp(mu_t (exp(theta cap) - 1) / cap)

Nothing is assumed about variance, tail or independence. For N tokens, with the best theta
(Chernoff),

    P( (1/N) sum_t x_t >= r mu ) <= p      where   r log r - r + 1 = log(1 / p) cap / (mu N)

Over all submissions of a worker: exp(theta sum_t (x_t - `drift` mu)), drift = (exp(u) - 1) / u and
theta = u / cap, is a supermartingale that starts at 1, so by Ville's inequality the sum exceeds
log(1 / p) / theta at any time with a chance of p. The sum starts again whenever it falls below 0
(Page's CUSUM), so a worker cannot offset later gaps by earlier honest work. A sum may start at each
of its submissions: over `SUBMISSIONS` submissions the chance of a false alarm is p.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Literal

from runspec.core.schema import SamplerPool, Thresholds
from runspec.core.schema.fields import FloatType

if TYPE_CHECKING:  # the state machine and commands need limits, and no arrays
    import numpy as np
from pydantic import ConfigDict, Field

SUBMISSIONS = 10_000
"""Submissions of one worker, among which a false alarm has the chance p."""
_U = 0.4314
DRIFT = math.expm1(_U) / _U
"""Largest long-run mean of a worker as a multiple of the honest mean: 1.25."""


@dataclass(frozen=True)
class GapNoise:
    """Calibrated noise of the gaps of an honest pool (`verify.calibration.derive`)."""

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    cap: Annotated[float, Field(gt=0.0)]
    """Largest part of one token's gap that counts, nats."""
    mean: Annotated[float, Field(gt=0.0)]
    """mu: mean of honest gaps so counted, nats a token."""
    probability: Annotated[float, Field(gt=0.0, lt=1.0)]
    """p: chance of a false alarm."""

    def counted(self, gaps: np.ndarray) -> float:
        """Return sum_t min(g_t, cap) of f32 [n] gaps, nats."""
        return float(gaps.clip(max=self.cap).sum(dtype="float64"))

    def largest_mean(self, tokens: int) -> float:
        """Return the largest mean of so many counted gaps, nats."""
        spread = -math.log(self.probability) * self.cap / (self.mean * tokens)
        ratio = root(
            lambda r: r * math.log(r) - r + 1.0 - spread, 1.0, math.e**2 + spread, halvings=80
        )
        return min(self.cap, self.mean * ratio)

    def excess(self, gaps: np.ndarray) -> float:
        """Return by how much f32 [n] gaps exceed a worker's long-run budget, nats."""
        return self.counted(gaps) - DRIFT * self.mean * len(gaps)

    @property
    def largest_excess(self) -> float:
        """Largest sum of the excesses of a worker's submissions, nats."""
        return math.log(SUBMISSIONS / self.probability) * self.cap / _U


def root(rising: Callable[[float], float], low: float, high: float, *, halvings: int) -> float:
    """Return where a rising function is 0, by bisection."""
    for _ in range(halvings):
        middle = (low + high) / 2.0
        if rising(middle) < 0.0:
            low = middle
        else:
            high = middle
    return high


REWARD_TOLERANCE = 1e-4
"""Largest |claimed - re-graded| reward: float32 rounding only."""
LOGPROB_CEILING = 1e-4
"""Largest claimed log-prob: 0 plus rounding."""
LOGPROB_FLOOR = -1e4
"""Smallest claimed log-prob. Sampling from float32 probabilities, or with float32 noise, gives no
token below e^-104; the engines' rounding at low temperatures adds to that."""

SHORT_TAUS = 3.0
"""Largest gap, in tau, of the one exception in a rollout too short for a share of exceptions. Of
1,086,372 honest tokens in bfloat16, 7 had a gap above tau (0.1); the largest was 0.2035
(`docs/attacks.md`)."""
NULL_BITS = 40.0
"""Least bits that passing a chunk must be worth for the chunk to count (`toploc.statistics`)."""
RICH_BITS = 160.0
"""Least bits of a more lenient test: eight times the 20 bits of 1e-6. The hits of forgeries that
know no tokens vary up to 5.4 times as much as independent hits."""
MODULUS_SLACK = 32
"""Largest difference of a proof's modulus below that of the recomputed positions. Positions that
differ clash under a given modulus with a chance below 0.12; in chunks of up to 65497 elements they
do not."""
TERMS_SLACK = 3
"""Leading coefficients that may be zero; one honest proof in 65497**4 has more."""


SELECTIVE_ELEMENTS = 256
"""2k. If k is most of a chunk, the smallest selected activations are near 0, with random
mantissas."""


@dataclass(frozen=True)
class ChunkLimits:
    """TOPLOC's limits for short chunks: few tokens, or a small hidden size."""

    below: int
    """The limits are for chunks with fewer activations than this."""
    mismatch_share: float
    miss_share: float
    mantissa_mean: float
    """Infinity if it is not judged."""
    mantissa_median: float


@dataclass(frozen=True)
class Limits:
    """A value passes when it is at most its limit."""

    logprob_submission: float
    """Mean |claimed - recomputed| log-prob over all output tokens of a submission, nats."""
    logprob_rollout: float
    """The same over one rollout, nats."""
    gap: float
    """tau: how far below the recomputed maximum a seeded choice may lie, nats."""
    gap_share: float
    """Share of a rollout's tokens that may exceed `gap`, rounded down to whole tokens. If that is
    no token and the share is not 0, one token may, up to `SHORT_TAUS` tau
    (`verify.checks`)."""
    gap_max: float
    """Largest gap of any token."""
    gap_mean: float
    """Mean gap over the tokens of a submission, beyond what one token at `gap` adds; nats."""
    mismatch_share: float
    """TOPLOC: share of the k positions that may differ in exponent or sign."""
    miss_share: float
    """TOPLOC: share of the k positions that may always be off by more than the null test's radius.
    In chunks that are hard to guess, `mismatch_share` of them may."""
    mantissa_mean: float
    """TOPLOC: mean mantissa error, of 128."""
    mantissa_median: float
    """TOPLOC: median mantissa error, of 128."""
    constant_ratio: float
    """Median error over the least that a constant proof could reach; below 1, so none passes."""
    gap_noise: GapNoise | None = None
    """Budget of gaps in calibrated seeded pools, in addition to `gap_mean`: for a submission, and
    for all submissions of a worker."""
    short: tuple[ChunkLimits, ...] = ()
    """Limits of short chunks, by `below`, ascending. Without them the limits above hold, but the
    mantissa mean is not judged below `SELECTIVE_ELEMENTS`."""

    def for_chunk(self, elements: int) -> Limits:
        """Return the limits of a chunk with this number of activations."""
        here = next((each for each in self.short if elements < each.below), None)
        if here is not None:
            short = {name: limit for name, limit in vars(here).items() if name != "below"}
            return replace(self, **short)
        if elements < SELECTIVE_ELEMENTS:
            return replace(self, mantissa_mean=math.inf)
        return self


FLOAT32 = Limits(
    logprob_submission=2e-3,
    logprob_rollout=5e-3,
    gap=1e-3,
    gap_share=0.0,
    gap_max=1e-3,
    gap_mean=1e-5,
    mismatch_share=8 / 128,
    miss_share=8 / 128,
    mantissa_mean=1.0,
    mantissa_median=1.0,
    constant_ratio=0.5,
)
"""float32 on both sides: only the order of summation differs."""

BFLOAT16 = Limits(
    logprob_submission=0.03,
    logprob_rollout=0.1,
    gap=0.1,
    gap_share=0.01,
    gap_max=2.0,
    gap_mean=1e-3,
    mismatch_share=38 / 128,
    miss_share=20 / 128,
    mantissa_mean=10.0,
    mantissa_median=8.0,
    constant_ratio=0.8,
)
"""bfloat16 on either side; the TOPLOC limits are the published ones (arXiv 2501.16007)."""


Precision = Literal["float32", "bfloat16", "fp8"]

LOGPROB_ALARM: dict[Precision, float] = {"float32": 1e-3, "bfloat16": 0.02, "fp8": 0.15}
"""Mean |sampler's - learner's| log-prob of a step, in nats, above which a person should look. It
lies between the values of honest pools (1e-6, 0.003 to 0.013, 0.04 to 0.10) and the validators'
limits."""

CALIBRATED: frozenset[tuple[Precision, FloatType]] = frozenset(
    {("float32", "float32"), ("bfloat16", "float32"), ("bfloat16", "bfloat16")}
)
"""Pairs (sampler, validator) whose honest rollouts were measured against the limits above."""


def precision_of(pool: SamplerPool) -> Precision:
    """Return the precision that a pool computes in: its quantisation, else its dtype."""
    return pool.quantization or pool.dtype


def limits_for(
    sampler: Precision, validator: FloatType, thresholds: Sequence[Thresholds] = ()
) -> Limits:
    """Return the limits for the precisions of a pool and of the prefill engine.

    Args:
        sampler: see `precision_of`.
        validator: `learner.compute_dtype`.
        thresholds: `verify.thresholds`; those of the sampler's precision replace the limits here,
            except `constant_ratio`, which depends on forgers and not on rounding. `miss_share` is
            then their `mismatch_share`.

    Returns:
        The limits; those of bfloat16 for a pair that was not calibrated and has no thresholds. They
        may reject honest work; the lint rule `uncalibrated-precision` finds such a spec.
    """
    here = FLOAT32 if sampler == validator == "float32" else BFLOAT16
    given = next((limits for limits in thresholds if limits.name == sampler), None)
    if given is None:
        return here
    return replace(here, miss_share=given.mismatch_share, **given.model_dump(exclude={"name"}))
