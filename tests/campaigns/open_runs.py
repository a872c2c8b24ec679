"""Measures what random mixtures of up to 1,000 hostile keys do to a simulated run.

Each mixture meets a run with one known worker, and one with two honest strangers. The factor is the
time of the run over its time without hostile keys. Then the waste of honest populations alone.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from random import Random
from statistics import median

from tests.runspec.simulate.mixtures import (
    FOUND,
    KNOWN,
    STRANGERS,
    Group,
    Run,
    honest_population,
    key_cost_s,
    mixture,
    outcome,
    simulated,
)

MIXTURES = int(os.environ.get("OPEN_RUNS_MIXTURES", "200"))
POPULATIONS = int(os.environ.get("OPEN_RUNS_POPULATIONS", "60"))
MOST_KEYS = 1000


def run() -> dict[str, dict[str, object]]:
    """Factors and waste. Prints mixtures beyond 1.5 on standard error."""
    drawn = [mixture(Random(f"open runs {seed}"), MOST_KEYS) for seed in range(MIXTURES)]
    return {
        "one known worker": _factors((KNOWN, hostile) for hostile in drawn),
        "two strangers": _factors((STRANGERS, hostile) for hostile in drawn),
        "mixtures that a search found": _factors(FOUND),
        "honest populations, async_level 0": _waste(0),
        "honest populations, async_level 2": _waste(2),
    }


def _factors(cases: Iterable[tuple[Run, list[Group]]]) -> dict[str, object]:
    factors, costs, wasted, stalled = [], [0.0], [0.0], 0
    for run, hostile in cases:
        found = outcome(run, hostile)
        stalled += found.stalled
        factors.append(found.factor)
        costs.append(found.key_s / key_cost_s(run))
        wasted.append(found.wasted)
        if found.factor > 1.5:
            print(f"{found.factor:.2f}: {run}, {hostile}", file=sys.stderr)
    return {
        "mixtures": len(factors),
        "stalled": stalled,
        "factor, median": round(median(factors), 2),
        "worst": round(max(factors), 2),
        "beyond 1.5": sum(factor > 1.5 for factor in factors),
        "largest cost of a key over b": round(max(costs), 3),
        "largest waste": f"{max(wasted):.1%}",
    }


def _waste(async_level: int) -> dict[str, object]:
    wasted = []
    for seed in range(POPULATIONS):
        workers = honest_population(Random(f"honest {seed}"))
        result = simulated(Run(async_level=async_level), workers)
        wasted.append(result.wasted_share or 0.0)
    return {
        "populations": POPULATIONS,
        "waste, median": f"{median(wasted):.1%}",
        "largest": f"{max(wasted):.1%}",
        "beyond 10 %": sum(share > 0.1 for share in wasted),
    }
