"""Does it learn? The quickstart's run at its default size, seed by seed.

Passes a seed when the task reward rises by at least 0.35 absolute and the length error falls by at
least half, between the means of the first and the last ten steps.
"""

from __future__ import annotations

import json
from typing import Any

from benchmarks.runs import measure

SEEDS = (42, 43, 44)
REWARD_RISE, LENGTH_ERROR_RATIO = 0.35, 0.5


def learned(name: str, overrides: dict[str, Any]) -> dict[str, Any]:
    """Return what a run learned, from its first to its last ten steps, and whether it passes."""
    summary = measure(name, overrides).summary
    rise = summary["task_reward_last"] - summary["task_reward_first"]
    ratio = summary["length_error_last"] / summary["length_error_first"]
    return {
        "seed": overrides["seed"],
        "task_reward": [summary["task_reward_first"], summary["task_reward_last"]],
        "length_error": [summary["length_error_first"], summary["length_error_last"]],
        "rise": round(rise, 3),
        "length_error_ratio": round(ratio, 3),
        "steps": summary["steps"],
        "wall_s": summary["wall_s"],
        "max_lag": summary["max_lag"],
        "mean_lag": summary["mean_lag"],
        "passed": rise >= REWARD_RISE and ratio <= LENGTH_ERROR_RATIO,
    }


def main() -> int:
    rows = [learned(f"learning-{seed}", {"seed": seed}) for seed in SEEDS]
    print(json.dumps({"benchmark": "learning", "seeds": rows}, indent=1))
    return 0 if all(row["passed"] for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
