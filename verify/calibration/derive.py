"""Derives limits from measurements; no limit is looser than published unless that is allowed.

The rate is the share of rollouts that any number rejects, so each of J numbers gets rate / J.
`tail_bound` gives the bound of each number.

    limit = min(published, max(bound, floor))

If the published limit is lower, the rate is not kept, unless looser limits are allowed. The floor
is the least limit, whatever is measured: float32's limits of TOPLOC (ties between the 128th and the
129th magnitude alone cost up to 4 positions), 1e-4 nats of log-prob and 1e-6 nats of mean gap,
about a hundred times float32's rounding. tau (`gap`) is never lowered, because it also limits how
far logits may differ at the edge of top-p and at the end token, which gaps do not measure. The
share of tokens above tau is not lowered, nor is the largest gap below that of a short rollout's
exception. So few tokens reach the tail of gaps that the measured rollouts may not show it.

The sum of gaps has a budget (`noise_of`, `verify.thresholds.GapNoise`) in addition to the published
limit of their mean. The budget needs the mean of honest gaps,

    mu = ROOM (mean + 3 standard errors + 7 cap / N)

over the N tokens of the part of the run where that is largest, because rounding changes with the
policy (by 1.6 within 20 updates that moved log-probs by 0.1, `docs/verify.md`). The standard error
is that of groups, whose tokens share a prompt. With the last term, the chance to miss a gap that
was never seen is exp(-7). Prompts differ, so mu is raised until every measured group alone would
keep its budget. Most gaps are below the cap. A lower cap hides the difference between other weights
and rounding; with a higher cap a few tokens decide.

The bound of a number is in a tail that the samples do not reach.
A false-rejection rate of 1e-6 cannot be counted in a thousand rollouts, so it is extrapolated.
Above the m-th largest of n values, u, the excess is assumed to be exponential (geometric for
counts). Its mean is the largest that m such excesses allow at 95 %, and its share is two sigmas
above the measured one:

    P(X > x) <= q exp(-(x - u) / scale),   q = (m + 2 sqrt m) / n,   bound = u + scale ln(q / p)

If the density is log-concave beyond u (normal, gamma, exponential, binomial, and means of many
such) the mean excess falls with u, so the bound is rather too large than too small. If the tail is
heavier, the excesses vary more than their mean (residual coefficient of variation, del Castillo,
Daoudi and Lockhart 2014), and there is no bound.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from runspec.core.errors import UserError
from verify.calibration.measure import SHORT_BELOW, Measurements, key_of
from verify.profile import LimitTable, Number
from verify.thresholds import FLOAT32, SHORT_TAUS, ChunkLimits, GapNoise, Limits, root
from verify.toploc.statistics import RADII

MIN_SAMPLES = 40
"""Fewest samples from which a tail can be estimated."""
FURTHEST = 14.0
"""A bound is at most exp(14), a million, times rarer than the rarest sample."""
_LEAST_EXCESSES = 20
_EXCESS_SHARE = 0.02
_CONFIDENCE = 0.95
_SPREAD_SIGMAS = 3.0
_HALVINGS = 60


@dataclass(frozen=True)
class Bound:
    """Upper bound of one number."""

    value: float | None
    """An honest value exceeds it with a probability of at most p; None: `why` has the reason."""
    why: str = ""


def samples_needed(probability: float) -> int:
    """Return the least number of samples for a bound at this probability."""
    return max(MIN_SAMPLES, math.ceil(1.0 / (probability * math.exp(FURTHEST))))


def tail_bound(values: np.ndarray, probability: float, *, unit: float | None = None) -> Bound:
    """Return the value that the next one exceeds with a probability of at most `probability`.

    Args:
        values: f64 [n], independent and of one kind, none negative.
        probability: p.
        unit: distance between two neighbouring values of a count; None for other numbers.
    """
    n = len(values)
    if n < samples_needed(probability):
        return Bound(None, f"{n} samples, {samples_needed(probability)} needed")
    if not np.isfinite(values).all():
        return Bound(None, "not finite")
    ordered = np.sort(values.astype(np.float64))[::-1]
    m = max(_LEAST_EXCESSES, math.ceil(_EXCESS_SHARE * n))
    if unit is None:
        return _continuous(ordered, m, probability)
    return _counts(np.ceil(ordered / unit).astype(np.int64), m, probability, unit)


def _continuous(ordered: np.ndarray, m: int, probability: float) -> Bound:
    positive = int((ordered > ordered[-1]).sum())
    m = min(m, positive, len(ordered) - 1)
    if m < _LEAST_EXCESSES // 2:
        return Bound(None, f"only {m} of {len(ordered)} differ from the least")
    excess = ordered[:m] - ordered[m]
    if not excess.any():
        return Bound(None, f"the {m + 1} largest of {len(ordered)} are all alike")
    spread = float(excess.std() / excess.mean())
    if spread > 1.0 + _SPREAD_SIGMAS / math.sqrt(m):
        return Bound(None, f"a heavier tail than exponential (spread {spread:.2f} of {m})")
    scale = float(excess.sum()) / _gamma_quantile(m, 1.0 - _CONFIDENCE)
    reach = _reach(m, len(ordered), probability)
    return Bound(max(float(ordered[0]), float(ordered[m]) + scale * reach))


def _counts(ordered: np.ndarray, m: int, probability: float, unit: float) -> Bound:
    """Return the bound by P(X >= u + j) <= q r**j, with the largest r that the excesses allow."""
    start = int(ordered[m - 1])
    excess = ordered[ordered >= start] - start
    m = len(excess)
    mean = float(excess.mean())
    widest = math.sqrt(mean * (mean + 1.0))  # of a geometric distribution
    if mean and float(excess.std()) > widest * (1.0 + _SPREAD_SIGMAS / math.sqrt(m)) + 1.0:
        return Bound(None, f"a heavier tail than geometric (spread {excess.std() / widest:.2f})")
    ratio = _geometric_ratio(int(excess.sum()), m)
    steps = math.ceil(_reach(m, len(ordered), probability) / -math.log(ratio))
    return Bound(unit * max(int(ordered[0]), start - 1 + steps))


def _reach(m: int, n: int, probability: float) -> float:
    """Return ln(q / p): the distance of the bound from u, in scales."""
    return max(0.0, math.log((m + 2.0 * math.sqrt(m)) / (n * probability)))


def _gamma_quantile(shape: int, share: float) -> float:
    """Return x with P(Gamma(shape, 1) <= x) = share."""

    def at_most(x: float) -> float:
        logs = [i * math.log(x) - x - math.lgamma(i + 1) for i in range(shape)]
        return 1.0 - math.fsum(map(math.exp, logs))

    return root(lambda x: at_most(x) - share, 1e-9, float(shape), halvings=_HALVINGS)


def _geometric_ratio(total: int, count: int) -> float:
    """Return the largest r for which `count` geometric excesses sum to at most `total` in 5 %."""

    def at_most(ratio: float) -> float:
        logs = [
            math.lgamma(count + s)
            - math.lgamma(count)
            - math.lgamma(s + 1)
            + s * math.log(ratio)
            + count * math.log1p(-ratio)
            for s in range(total + 1)
        ]
        return math.fsum(map(math.exp, logs))

    share = 1.0 - _CONFIDENCE
    return root(lambda r: share - at_most(r), 1e-12, 1.0 - 1e-12, halvings=_HALVINGS)


ROOM = 1.5
"""Factor of the mean for versions and prompts that were not measured."""
SMALLEST_CAP = 1.0 / 32.0
"""Smallest cap, in tau."""
PARTS = 8
"""Largest number of parts that a run is divided into."""
LEAST_GAPS = 400
"""Fewest gaps of a part, on average, if there are two or more parts. Three standard errors then are
a fifth of its mean."""
_RAISE = 1.05
_CAP_QUANTILE = 0.9
_SIGMAS = 3.0
_UNSEEN = 7.0


def noise_of(
    gaps: Sequence[np.ndarray], *, tau: float, least: float, probability: float
) -> GapNoise:
    """Return the noise of the gaps of an honest pool.

    Args:
        gaps: f32 [n] of each group, nats, in the order of their versions; more than one group,
            none empty.
        tau: the largest cap.
        least: the least mean, nats.
        probability: chance that an honest submission, or an honest worker, is rejected.
    """
    together = np.concatenate(gaps)
    above = together[together > 0.0]
    typical = float(np.quantile(above, _CAP_QUANTILE)) if len(above) else 0.0
    cap = float(f"{min(max(typical, SMALLEST_CAP * tau), tau):.3g}")
    sums = np.array([np.minimum(each, cap).sum(dtype=np.float64) for each in gaps])
    lengths = np.array([len(each) for each in gaps])
    parts = max(1, min(PARTS, len(above) // LEAST_GAPS, len(gaps) // 2))
    each_part = zip(np.array_split(sums, parts), np.array_split(lengths, parts), strict=True)
    upper = max(_upper(*part, cap) for part in each_part)
    noise = GapNoise(cap, max(least, ROOM * upper), probability)
    groups = list(zip((sums / lengths).tolist(), lengths.tolist(), strict=True))
    while noise.mean < cap and any(mean > noise.largest_mean(n) for mean, n in groups):
        noise = replace(noise, mean=_RAISE * noise.mean)
    return noise


def _upper(sums: np.ndarray, lengths: np.ndarray, cap: float) -> float:
    """Return the upper bound of a token's mean, from f64 [G] sums over i64 [G] tokens."""
    tokens, groups = int(lengths.sum()), len(sums)
    mean = float(sums.sum()) / tokens
    squares = float(((sums - mean * lengths) ** 2).sum()) * groups / (groups - 1)
    return mean + (_SIGMAS * math.sqrt(squares) + _UNSEEN * cap) / tokens


FLOOR = replace(FLOAT32, logprob_submission=1e-4, logprob_rollout=1e-4, gap_mean=1e-6)
_QUANTILES = (0.5, 0.9, 0.99, 1.0)
_MANY = 32_768
"""Number of tokens of the example in the note on a budget."""


@dataclass(frozen=True)
class Derived:
    """Limits of a profile, and the numbers that they come from."""

    limits: Limits
    numbers: dict[str, Number]
    looser: list[str]


def derive(
    measured: Measurements, published: Limits, *, rate: float, allow_looser: bool
) -> Derived:
    """Return the limits of an honest pool that was measured.

    Args:
        measured: numbers of the pool.
        published: the limits for the two precisions, `verify.thresholds.limits_for`.
        rate: share of honest rollouts that may be rejected.
        allow_looser: whether a bound above the published limit replaces it.

    Raises:
        UserError: there are too few rollouts for the rate, or too much noise to detect a guess.
    """
    # J, the number of measured numbers; the two radii of the null test count as one.
    twice = sum(f"miss_share {RADII[1]}" in key for key in measured.values)
    probability = rate / (len(measured.values) + bool(measured.gaps) - twice)
    needed = samples_needed(probability)
    if measured.rollouts < needed:
        raise UserError(
            f"{measured.rollouts} rollouts; {needed} are needed for a rate of {rate:g}",
            place="calibrate",
            remedy="let the run go on for more steps, keep more versions "
            "(`broadcast.keep_versions`), or state a higher --rate",
        )
    work = _Work(measured, published, probability, allow_looser)
    limits = replace(
        published,
        **work.logprobs(),
        **work.gaps(),
        **work.chunks(None),
        short=tuple(ChunkLimits(below=below, **work.chunks(below)) for below in SHORT_BELOW),
    )
    return Derived(limits, work.numbers, work.looser)


class _Work:
    """Derives one limit after the other, and records how."""

    def __init__(
        self, measured: Measurements, published: Limits, probability: float, allow_looser: bool
    ) -> None:
        self._values = {key: np.array(found) for key, found in measured.values.items()}
        self._unit = measured.unit
        self._published, self._probability = published, probability
        self._allow_looser, self._gaps = allow_looser, measured.gaps
        self.numbers: dict[str, Number] = {}
        self.looser: list[str] = []

    def limit(self, name: str, below: int | None = None, radius: int | None = None) -> float:
        """Return the limit of a number, for a class of chunks, rounded up to three digits."""
        key = key_of(name, below)
        measured = name if radius is None else f"{name} {radius}"
        values = self._values.get(key_of(measured, below))
        of_class = self._published if below is None else self._published.for_chunk(below - 1)
        published = getattr(of_class, name)
        if values is None:
            return float(published)
        bound = tail_bound(values, self._probability, unit=self._unit(measured, below))
        limit, note = self._chosen(key, bound, published, getattr(FLOOR, name))
        self._note(key, values, bound, published, limit, note)
        return limit

    def logprobs(self) -> dict[str, Any]:
        """Return the limits of log-probs, of a submission and of a rollout."""
        rollout, submission = self.limit("logprob_rollout"), self.limit("logprob_submission")
        if submission > rollout:
            # A mean over a submission varies less, but few submissions may not show that.
            submission = self._set("logprob_submission", rollout, "that of logprob_rollout")
        return {"logprob_submission": submission, "logprob_rollout": rollout}

    def gaps(self) -> dict[str, Any]:
        """Return tau, the largest gap, and the budget of gaps."""
        published, gaps = self._published, self._gaps
        if not gaps:
            return {}
        if len(gaps) == 1:
            raise UserError(
                "the gaps of one group do not show how groups differ",
                place="calibrate",
                remedy="measure more submissions",
            )
        tau = self._at_least("gap", published.gap, "tau, which is never lowered")
        short = _rounded_up(min(SHORT_TAUS * tau, published.gap_max))
        largest = self._at_least("gap_max", short, "what a short rollout may have")
        noise = noise_of(gaps, tau=tau, least=FLOOR.gap_mean, probability=self._probability)
        means = np.array([noise.counted(each) / len(each) for each in gaps])
        note = (
            f"gaps up to {noise.cap:g}; of {_MANY} tokens {noise.largest_mean(_MANY):.3g} at most, "
            f"of a worker an excess of {noise.largest_excess:.3g} nats"
        )
        self._note("gap_noise", means, Bound(noise.mean / ROOM), math.inf, noise.mean, note)
        return {"gap": tau, "gap_max": largest, "gap_noise": noise}

    def _at_least(self, name: str, least: float, note: str) -> float:
        limit = self.limit(name)
        return limit if limit >= least else self._set(name, least, note)

    def _set(self, key: str, limit: float, note: str) -> float:
        """Replace a limit of `limit` and note why."""
        if key in self.numbers:  # numbers without a measurement are not in the profile
            self.numbers[key] = self.numbers[key].model_copy(update={"limit": limit, "note": note})
        return limit

    def chunks(self, below: int | None) -> dict[str, Any]:
        """Return the limits of a class of chunks."""
        median = self.limit("mantissa_median", below)
        radius = next((radius for radius in RADII if median <= radius), None)
        if radius is None:
            raise UserError(
                f"honest mantissas differ by a median of {median:g} units in the last place: "
                f"above {RADII[-1]} no guess can be detected",
                place=key_of("mantissa_median", below),
                remedy="choose a precision or an engine nearer to the sampler's",
            )
        mismatch = self.limit("mismatch_share", below)
        miss = self.limit("miss_share", below, radius)
        if miss > mismatch:  # the null test allows from miss_share to mismatch_share
            miss = self._set(key_of("miss_share", below), mismatch, "that of mismatch_share")
        return {
            "mismatch_share": mismatch,
            "miss_share": miss,
            "mantissa_mean": self.limit("mantissa_mean", below),
            "mantissa_median": median,
        }

    def _chosen(self, key: str, bound: Bound, published: float, floor: float) -> tuple[float, str]:
        if bound.value is None:
            return published, f"published: {bound.why}"
        wanted = _rounded_up(max(bound.value, min(floor, published)))
        if key.split(" ")[0].endswith("_share"):
            wanted = min(wanted, 1.0)
        if wanted <= published:
            return wanted, "" if bound.value >= floor else "the least that is set"
        if self._allow_looser:
            self.looser.append(key)
            return wanted, "looser than published"
        return published, "published: the bound is looser"

    def _note(
        self,
        key: str,
        values: np.ndarray,
        bound: Bound,
        published: float,
        limit: float,
        note: str,
    ) -> None:
        finite = values[np.isfinite(values)]
        quantiles = {f"{q:g}": float(np.quantile(finite, q)) for q in _QUANTILES if len(finite)}
        self.numbers[key] = Number(
            samples=len(values),
            quantiles=quantiles,
            bound=bound.value,
            published=_finite(published),
            limit=_finite(limit),
            note=note[:200],
        )


def _rounded_up(value: float) -> float:
    if value <= 0.0:
        return 0.0
    digit = 10.0 ** (math.floor(math.log10(value)) - 2)
    return float(f"{math.ceil(value / digit - 1e-9) * digit:.6g}")


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def as_table(limits: Limits) -> LimitTable:
    """Return the limits in the form of a profile."""
    short = [{**vars(row), "mantissa_mean": _finite(row.mantissa_mean)} for row in limits.short]
    table = vars(limits) | {"short": short}
    del table["constant_ratio"]
    return LimitTable.model_validate(table)
