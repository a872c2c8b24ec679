"""Measures what random mixtures of up to 1,000 hostile keys do to a simulated run.

Each mixture meets a run with one known worker, and one with two honest strangers. The factor is the
time of the run over its time without hostile keys.
"""

from __future__ import annotations

import json
import os
import sys
from random import Random
from statistics import median

from tests.runspec.simulate.mixtures import KNOWN, STRANGERS, mixture, outcome

MIXTURES = int(os.environ.get("OPEN_RUNS_MIXTURES", "200"))
MOST_KEYS = 1000


def run() -> dict[str, dict[str, object]]:
    """Stalls and factors, by who is honest. Prints the worst mixtures on standard error."""
    return {"one known worker": _campaign(KNOWN), "two strangers": _campaign(STRANGERS)}


def _campaign(honest: dict) -> dict[str, object]:
    drawn = [mixture(Random(f"open runs {seed}"), MOST_KEYS) for seed in range(MIXTURES)]
    found = [(outcome(honest, hostile), hostile) for hostile in drawn]
    finished = [(result.factor, hostile) for result, hostile in found if not result.stalled]
    if finished:
        worst = max(finished, key=lambda pair: pair[0])
        print(f"worst of {honest['name']}:", json.dumps(worst), file=sys.stderr)
    factors = [factor for factor, _ in finished]
    return {
        "mixtures": MIXTURES,
        "stalled": sum(result.stalled for result, _ in found),
        "factor of the others, median": round(median(factors), 1) if factors else "-",
        "worst": round(max(factors), 1) if factors else "-",
        "beyond 1.5": sum(factor > 1.5 for factor in factors),
    }
