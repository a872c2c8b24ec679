"""Does it learn? The quickstart's run at its default size, seed by seed.

Passes a seed when the task reward rises by at least 0.35 absolute and the length error falls by at
least half, between the means of the first and the last ten steps.

`--draw RUN_DIR FILE.svg` draws task reward and evaluations of a finished run instead.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks.runs import measure
from runspec.core.run_files import evaluation_files
from runspec.local.metrics import read_rows
from runspec.local.plots import Curve, Figure, draw
from verify.formats.documents import read_evaluations

SEEDS = (42, 43, 44)
GREY = "#7d8590"
"""Colour of the text, which reads well on light and on dark pages."""
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


def picture(run_dir: Path) -> str:
    """Return the SVG of a run's task reward by step, and of its evaluations by version."""
    rows = read_rows(run_dir)
    curves = [Curve("task reward", [(row["step"], row["task_reward"]) for row in rows])]
    results = read_evaluations(evaluation_files(run_dir))
    for name in sorted({each.evaluation for each in results}):
        own = [each for each in results if each.evaluation == name]
        means = [(each.version, each.figures["mean"]) for each in own]
        band = [(x, mean.low or mean.value, mean.high or mean.value) for x, mean in means]
        points = [(x, mean.value) for x, mean in means]
        curves.append(Curve(f"evaluation {name}", points, averaged=False, band=band))
    return draw(Figure("Task reward", "", curves, bottom=0.0)).replace("currentColor", GREY)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.learning", description=__doc__)
    parser.add_argument("--draw", nargs=2, type=Path, metavar=("RUN_DIR", "FILE.svg"))
    if (given := parser.parse_args().draw) is not None:
        given[1].write_text(picture(given[0]), encoding="utf-8")
        return 0
    rows = [learned(f"learning-{seed}", {"seed": seed}) for seed in SEEDS]
    print(json.dumps({"benchmark": "learning", "seeds": rows}, indent=1))
    return 0 if all(row["passed"] for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
