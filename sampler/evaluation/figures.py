"""Figures of an evaluation, each a mean over problems with a 95 % interval."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np

from verify.formats.evaluation import Figure, ProblemResult

SOLVED = 1.0
"""Least task reward of an answer that solves its problem."""
MANY = 100
"""Problems from which on an interval is the bootstrap's."""
LEVEL = 0.95
_RESAMPLES = 1000


def figures(problems: Sequence[ProblemResult]) -> dict[str, Figure]:
    """Return the figures of graded problems.

    `mean` is the mean task reward, `pass-K` the chance that one of K answers solves a problem, for
    K = 2, 4, 8, ... up to the number of answers, `majority` the reward of the most frequent answer,
    `length` the mean output in tokens, and `length-error` its mean distance from the target.

    Args:
        problems: those of which at least one answer was graded.
    """
    graded = [[r for r in each.rewards if r is not None] for each in problems]
    found = {"mean": [_mean(rewards) for rewards in graded]}
    most, k = min(map(len, graded), default=0), 2
    while k <= most:
        solved = [sum(r >= SOLVED for r in rewards) for rewards in graded]
        counts = zip(graded, solved, strict=True)
        found[f"pass-{k}"] = [pass_at_k(len(rewards), c, k) for rewards, c in counts]
        k *= 2
    if most > 1:
        found["majority"] = [each.majority for each in problems if each.majority is not None]
    found["length"] = [_mean(each.lengths) for each in problems]
    if asked := [each for each in problems if each.target is not None]:
        found["length-error"] = [
            _mean([abs(length - (each.target or 0)) for length in each.lengths]) for each in asked
        ]
    return {name: mean_of(np.array(values)) for name, values in found.items() if values}


def pass_at_k(answers: int, solved: int, k: int) -> float:
    """Return the chance that k of the answers, drawn without repetition, have a solution.

    1 - C(n - c, k) / C(n, k), unbiased for the chance of k fresh answers (Chen et al. 2021,
    arXiv 2107.03374, equation 1).
    """
    return 1.0 - math.comb(answers - solved, k) / math.comb(answers, k)


def majority(answers: Sequence[str | None], rewards: Sequence[float | None]) -> float | None:
    """Return the mean reward of the most frequent answer, or of those that are equally frequent.

    Args:
        answers: text of each answer; None if the model gave none.
        rewards: task reward of each; None if the grader failed.
    """
    pairs = zip(answers, rewards, strict=True)
    graded = [(a and a.strip(), r) for a, r in pairs if r is not None]
    if not graded:
        return None
    votes = Counter(answer for answer, _ in graded if answer)
    if not votes:
        return 0.0
    most = max(votes.values())
    winners = [answer for answer, count in votes.items() if count == most]
    return _mean([_mean([r for a, r in graded if a == winner]) for winner in winners])


def mean_of(values: np.ndarray) -> Figure:
    """Return the mean of one value a problem, with its interval."""
    low, high = interval(values) if len(values) > 1 else (None, None)
    return Figure(float(values.mean()), low, high)


def interval(values: np.ndarray) -> tuple[float, float]:
    """Return a 95 % interval of the mean over all problems like these.

    From `MANY` problems on it is the bootstrap over problems, corrected for bias and skewness (BCa;
    Efron 1987). With fewer, or if all values are equal, it is Student's t. Shares then get four
    more values, two zeros and two ones (Agresti and Coull 1998, for proportions), because the
    spread of a few shares near 0 or 1 is often far too small.

    Args:
        values: one a problem, float64 [n], n >= 2.
    """
    from scipy import stats  # its import takes a while, and a worker needs none of this

    n = len(values)
    if n >= MANY and np.ptp(values) > 0:
        found = stats.bootstrap(
            (values,),
            np.mean,
            confidence_level=LEVEL,
            n_resamples=_RESAMPLES,
            method="BCa",
            rng=np.random.default_rng(0),
        ).confidence_interval
        if math.isfinite(found.low) and math.isfinite(found.high):
            return float(found.low), float(found.high)
    shares = values.min() >= 0.0 and values.max() <= 1.0
    padded = np.concatenate([values, [0.0, 0.0, 1.0, 1.0]]) if shares else values
    half = stats.t.ppf((1 + LEVEL) / 2, len(padded) - 1) * padded.std(ddof=1)
    half /= math.sqrt(len(padded))
    low, high = padded.mean() - half, padded.mean() + half
    return (max(0.0, float(low)), min(1.0, float(high))) if shares else (float(low), float(high))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
