"""Searches for the mixture of hostile keys that slows a simulated run most.

Random restarts, each followed by changes of one group at a time that are kept if the run takes
longer. The search goes over the run too: its lag, its leases, its honest workers. What it finds
belongs into `tests/runspec/simulate/mixtures.py`.
"""

from __future__ import annotations

import os
import sys
import time
from random import Random

from tests.runspec.simulate.mixtures import (
    Group,
    Outcome,
    Run,
    hostile_group,
    key_cost_s,
    mixture,
    outcome,
)

SECONDS = float(os.environ.get("WORST_MIXTURES_SECONDS", "600"))
SEED = os.environ.get("WORST_MIXTURES_SEED", "0")
MOST_KEYS = 40
TRIES = 12
"""Changes in a row that are worse, after which the search begins anew."""
_SHAPES = [(16, 8), (16, 8), (16, 4), (16, 16), (16, 1), (64, 1)]
"""Groups of a step and of a lease."""
_PRINTED = 1.3

Found = tuple[float, Run, list[Group], Outcome]


def run() -> dict[str, dict[str, object]]:
    """The worst factors, by who is honest. Prints bad mixtures on standard error."""
    return {"known workers": _search(known=True), "strangers": _search(known=False)}


def _search(*, known: bool) -> dict[str, object]:
    dice, end = Random(f"worst mixtures {SEED} {known}"), time.monotonic() + SECONDS
    worst: list[Found] = []
    while time.monotonic() < end:
        worst.append(_climb(dice, _run(dice, known=known), end))
    worst.sort(key=lambda found: -found[0])
    shares = [found[3].key_s / key_cost_s(found[1]) for found in worst]
    return {
        "restarts": len(worst),
        "worst factors": " ".join(f"{score:.2f}" for score, *_ in worst[:5]),
        "largest cost of a key over b": f"{max(shares):.2f}",
    }


def _run(dice: Random, *, known: bool) -> Run:
    groups, lease = dice.choice(_SHAPES)
    return Run(
        known=dice.choice((1, 1, 2, 4)) if known else 0,
        strangers=0 if known else dice.choice((2, 2, 4)),
        speed=dice.choice((0.25, 0.5, 1.0, 1.0, 2.0)),
        async_level=dice.choice((0, 2)),
        groups=groups,
        lease=lease,
        steps=5 if groups == 64 else 20,
    )


def _climb(dice: Random, run: Run, end: float) -> Found:
    """Changes a mixture until nothing makes it worse."""
    hostile, failed = mixture(dice, MOST_KEYS), 0
    best = outcome(run, hostile)
    while failed < TRIES and time.monotonic() < end:
        changed = _changed(dice, hostile)
        now = outcome(run, changed)
        if _score(now) > _score(best):
            hostile, best, failed = changed, now, 0
        else:
            failed += 1
    if _score(best) > _PRINTED:
        print(f"{best.factor:.3f}: ({run}, {hostile})", file=sys.stderr, flush=True)
    return _score(best), run, hostile, best


def _score(found: Outcome) -> float:
    return found.factor + 100.0 * found.stalled


def _changed(dice: Random, hostile: list[Group]) -> list[Group]:
    """The mixture with one group of another strategy, size or timing."""
    groups = list(hostile)
    number = dice.randrange(len(groups))
    old = groups[number]
    drawn = hostile_group(dice, old["name"], old["count"])
    count = min(MOST_KEYS, max(1, round(old["count"] * dice.choice((0.5, 0.8, 1.25, 2.0)))))
    changes = [{**old, "strategy": drawn["strategy"]}, {**drawn, "strategy": old["strategy"]}]
    groups[number] = dice.choice([drawn, *changes, {**old, "count": count}])
    return groups
