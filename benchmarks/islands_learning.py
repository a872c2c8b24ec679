"""Two learner islands learn as one learner does, from as many rollouts: the quickstart's run.

Three seeds, each with one learner and with two islands on a core each, in turn. It passes when the
islands' mean task reward and length error at the end differ from the learner's by no more than the
learner's own seeds differ among each other.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from benchmarks.runs import measure

SEEDS = (42, 43, 44)
STEPS = 250
ISLANDS = "{count: 2, codec: {kind: float16}, outer: {lr: 1.0, momentum: 0.0}}"
ONE_CORE = {"learner.hardware.count": 1, "learner.mesh": "{fsdp: 1}", "steps": STEPS}


def learned(name: str, overrides: dict[str, Any]) -> dict[str, Any]:
    """Return what a run learned, from its first to its last ten steps."""
    summary = measure(name, overrides).summary
    pairs = {
        figure: [summary[f"{figure}_first"], summary[f"{figure}_last"]]
        for figure in ("task_reward", "length_error")
    }
    return {"seed": overrides["seed"], "wall_s": summary["wall_s"], **pairs}


def at_the_end(rows: list[dict[str, Any]], figure: str) -> list[float]:
    """Return the figure's mean over the last ten steps, by seed."""
    return [row[figure][-1] for row in rows]


def main() -> int:
    one, islands = [], []
    for seed in SEEDS:
        common = ONE_CORE | {"seed": seed}
        one.append(learned(f"learner-{seed}", common))
        islands.append(learned(f"islands-{seed}", common | {"learner.islands": ISLANDS}))
        print(json.dumps({"one learner": one[-1], "two islands": islands[-1]}), file=sys.stderr)
    passed = True
    for figure in ("task_reward", "length_error"):
        ours, theirs = at_the_end(islands, figure), at_the_end(one, figure)
        difference = abs(sum(ours) - sum(theirs)) / len(SEEDS)
        passed &= difference <= max(theirs) - min(theirs)
    figures = {"benchmark": "islands_learning", "one learner": one, "two islands": islands}
    print(json.dumps(figures | {"within the seeds' spread": passed}, indent=1))
    return 0 if passed else 1


if __name__ == "__main__":
    raise SystemExit(main())
