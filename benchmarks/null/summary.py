"""What the judgements of a forgery say: counts, exact bounds from them, an extrapolated tail.

Windows are drawn at random without replacement (`text_model.windows`), so that Clopper and
Pearson's bounds hold for this text whatever it is, and with the window as the unit they assume
nothing of the chunks within one.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from benchmarks.null.judging import ACCEPTED, DECIDED, PUBLISHED, RATIO
from verify.thresholds import NULL_BITS
from verify.toploc import TOP_K
from verify.toploc.statistics import bits_against_guessing

_CONFIDENCE = 0.95
_NEAREST = 0.01


def summary(rows: np.ndarray) -> dict[str, Any]:
    """Of i16 [windows, chunks, 3] as `judging.judged`."""
    hits, short, flags = np.moveaxis(rows, 2, 0)
    told, accepted = flags & DECIDED > 0, flags & ACCEPTED > 0
    forged = told.any(axis=1)  # windows whose verdict would claim something
    whole = forged & (accepted | ~told).all(axis=1)
    some = (told & accepted).any(axis=1)
    return {
        "chunks": told.size,
        "pass_published": int((flags & PUBLISHED > 0).sum()),
        "pass_ratio": int((flags & RATIO > 0).sum()),
        "pass": int(accepted.sum()),
        "decided": int(told.sum()),
        "pass_decided": int((told & accepted).sum()),
        "windows": int(forged.sum()),
        "windows_pass_some": int(some.sum()),
        "windows_pass": int(whole.sum()),
        "window_below": f"{upper_bound(int(whole.sum()), int(forged.sum())):.1e}",
        **tail(hits[told], short[told]),
        **together(short, told),
    }


def tail(hits: np.ndarray, short: np.ndarray) -> dict[str, Any]:
    """Of positions hit on chunks that are decided, and how many more were required.

    `pass_null` counts those whose hits suffice. `spread` is the variance of the hits over a
    binomial's of the same mean. `tail` extrapolates the hundredth that came nearest to what was
    required, exponentially, to a pass: an assumption.
    """
    if len(hits) < 200:
        return {}
    mean = float(hits.mean())
    start = float(np.quantile(short, _NEAREST))
    nearest = start - short[short <= start]
    scale = max(float(nearest.mean()), 1.0)
    share = len(nearest) / len(short)
    return {
        "hits_mean": round(mean, 2),
        "hits_max": int(hits.max()),
        "short_least": int(short.min()),
        "pass_null": int((short <= 0).sum()),
        "spread": round(float(hits.var() / max(mean * (1 - mean / TOP_K), 1e-9)), 2),
        "tail": f"{share * math.exp(-max(start, 0.0) / scale):.1e}",
    }


def together(short: np.ndarray, told: np.ndarray) -> dict[str, float]:
    """How dependent the chunks of a window are, where a forgery comes near.

    P(both of two decided chunks of a window are among the nearest hundredth) over the square of
    the share that is: 1 where they are independent.
    """
    if told.sum() < 200:
        return {}
    near = told & (short <= np.quantile(short[told], _NEAREST))
    share = near.sum() / told.sum()
    pairs = int((told.sum(axis=1) * (told.sum(axis=1) - 1)).sum())
    both = int((near.sum(axis=1) * (near.sum(axis=1) - 1)).sum())
    return {"together": round(both / max(pairs, 1) / share**2, 1)}


def explained(rows: np.ndarray, known: np.ndarray) -> dict[str, int]:
    """A rule that is not in force: what a validator's own table of tokens hits is guessable too.

    Args:
        rows: judgements of a forgery.
        known: those of the table, of other text, that the validator would have.

    Returns:
        How many chunks would still be decided, and how many of them the forgery passes.
    """
    told = rows[..., 2] & DECIDED > 0
    required = (rows[..., 0] + rows[..., 1])[told].tolist()
    hits = known[..., 0][told].tolist()
    worth = [bits_against_guessing(TOP_K, h, r) for h, r in zip(hits, required, strict=True)]
    still = np.array(worth) >= NULL_BITS
    passed = rows[..., 2][told] & ACCEPTED > 0
    return {"decided": int(still.sum()), "pass_decided": int((still & passed).sum())}


def upper_bound(passed: int, tried: int) -> float:
    """Clopper and Pearson's at 95 %: the rate p of which so few in `tried` come with 5 %."""
    if passed >= tried:
        return 1.0
    low, high = 0.0, 1.0
    for _ in range(60):  # bisection: the chance of at most `passed` falls with p
        middle = (low + high) / 2
        if _at_most(passed, tried, middle) > 1 - _CONFIDENCE:
            low = middle
        else:
            high = middle
    return high


def _at_most(passed: int, tried: int, rate: float) -> float:
    terms = (
        math.lgamma(tried + 1)
        - math.lgamma(n + 1)
        - math.lgamma(tried - n + 1)
        + n * math.log(rate)
        + (tried - n) * math.log1p(-rate)
        for n in range(passed + 1)
    )
    return math.fsum(math.exp(term) for term in terms)
