"""What asynchrony buys: the same run with `async_level` 0 and 2, side by side."""

from __future__ import annotations

import json
from statistics import mean

from benchmarks.runs import MeasuredRun, measure

STEPS, WARM_UP = 60, 10


def figures(run: MeasuredRun) -> dict[str, float]:
    """Means over the steps after the warm-up, in which programs compile and engines start."""
    steady = run.metrics[WARM_UP:]
    seconds = steady[-1]["time"] - steady[0]["time"]
    return {
        "seconds_a_step": round(seconds / (len(steady) - 1), 3),
        "learner_busy_fraction": round(mean(m["learner_busy_fraction"] for m in steady), 3),
        "sampler_busy_fraction": round(
            mean(b for m in steady if (b := m["sampler_busy_fraction"]) is not None), 3
        ),
        "mean_lag": round(mean(m["lag_mean"] for m in steady), 3),
        "max_lag": max(m["lag_max"] for m in steady),
        "task_reward_last": round(run.summary["task_reward_last"], 3),
    }


def main() -> int:
    levels = {
        level: figures(measure(f"async-{level}", {"algorithm.async_level": level, "steps": STEPS}))
        for level in (0, 2)
    }
    speed_up = levels[0]["seconds_a_step"] / levels[2]["seconds_a_step"]
    print(
        json.dumps(
            {"benchmark": "asynchrony", "async_level": levels, "speed_up": round(speed_up, 2)},
            indent=1,
        )
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
