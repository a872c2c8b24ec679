"""Runs the recipe's switches and a real language model, and keeps what each run reached.

    python -m benchmarks.evidence                            # the rows and the recorded seeds
    python -m benchmarks.evidence run paper --seed 42        # `make evidence ROW=paper SEED=42`
    python -m benchmarks.evidence table switches             # a table of docs/evidence.md
    python -m benchmarks.evidence draw FILE.svg simple paper # task rewards of rows, --lengths too
    python -m benchmarks.evidence draw-run FILE.svg RUN_DIR  # of a run, with its evaluations

A switch's row is the laptop profile of TARGET-SHORT, which has the paper's switches, with the row's
own changes; all train on equally many rollouts. A run's figures are appended to
docs/evidence.csv with seed, commit and machine.
"""

from __future__ import annotations

import argparse
import csv
import os
import platform
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.runs import ROOT, SPEC, MeasuredRun, measure
from runspec.core.run_files import evaluation_files
from runspec.local.metrics import read_rows
from runspec.local.plots import Curve, Figure, draw
from verify.formats.documents import read_evaluations

TABLE = ROOT / "docs" / "evidence.csv"
DESCRIBE = ("git", "describe", "--always", "--dirty=+", "--abbrev=8")
PARTS = 20
"""Points of a committed curve."""
WARM_UP = 10
"""First steps, in which programs compile and engines start: no part of a step's seconds."""
GREY = "#7d8590"
"""Colour of a drawing's text, which reads well on light and on dark pages."""
SIMPLE: dict[str, Any] = {
    "algorithm.advantage.normalize": "none",
    "algorithm.filters.zero_variance": "false",
    "algorithm.loss_normalizer": "token",
    "algorithm.old_logprobs": "sampler",
    "algorithm.updates_per_step": 1,
    "optimizer.lr": "5e-4",
}
"""Without any of the paper's switches but clip and lag."""
STEPS, ISLAND_STEPS = 200, 250
ONE_CORE: dict[str, Any] = {
    **SIMPLE,
    "learner.hardware.count": 1,
    "learner.mesh": "{fsdp: 1}",
    "steps": ISLAND_STEPS,
}
ISLANDS = "{count: 2, codec: {kind: float16}, outer: {lr: 1.0, momentum: 0.0}}"


@dataclass(frozen=True)
class Row:
    changes: dict[str, Any] = field(default_factory=dict)
    """Of a shipped spec with its laptop profile, by path."""
    table: str = "switches"
    spec: str = SPEC


def switched(base: dict[str, Any] | None = None, *, of: str = "switches", **changes: Any) -> Row:
    """A row of the profile and its own changes of `algorithm`, in which `__` stands for a dot.

    Args:
        base: other changes.
        of: the table.
        changes: of `algorithm`.
    """
    own = {f"algorithm.{name.replace('__', '.')}": value for name, value in changes.items()}
    return Row({"steps": STEPS, **(base or {}), **own}, of)


HOT = {"optimizer.lr": "5e-4"}
hot = partial(switched, HOT, of="remedies")
"""The rate of one update a step in each of eight, and what may help."""
ROWS = {
    "laptop": Row(table="profile"),
    "paper": switched(),
    "simple": switched(SIMPLE),
    "advantage-task": switched(advantage__normalize="task"),
    "advantage-none": switched(advantage__normalize="none"),
    "filter-task": switched(filters__rewards="task"),
    "no-filter": switched(filters__zero_variance="false"),
    "task-no-filter": switched(advantage__normalize="task", filters__zero_variance="false"),
    "sampler-logprobs": switched(old_logprobs="sampler"),
    "updates-1": switched(updates_per_step=1),
    "updates-4": switched(updates_per_step=4),
    "one-sided-clip": switched(clip__delta="null"),
    "lag-0": switched(async_level=0),
    "lag-1": switched(async_level=1),
    "lag-4": switched({"broadcast.keep_versions": 6}, async_level=4),
    "hot": hot(),
    "hot-filter-task": hot(filters__rewards="task"),
    "hot-task-no-filter": hot(advantage__normalize="task", filters__zero_variance="false"),
    "hot-one-sided": hot(clip__delta="null"),
    "hot-capped": hot(importance__cap=2.0),
    "hot-one-update": hot(updates_per_step=1),
    "hot-larger-batch": switched(HOT | {"steps": STEPS // 4}, of="remedies", prompts_per_step=64),
    "hot-tight-clip": hot(clip__eps_low=0.1, clip__eps_high=0.1),
    "target-short": Row({"steps": STEPS}, table="targets"),
    "target-long": Row(
        {
            "steps": STEPS,
            "reward.length.targets": "[16, 32, 48, 64]",
            "model.max_context": 160,
            "samplers.volunteers.max_model_len": 160,
            "samplers.volunteers.max_new_tokens": 96,
            "learner.packing.tokens": 160,
        },
        table="targets",
    ),
    "one-learner": Row(ONE_CORE, table="islands"),
    "two-islands": Row({**ONE_CORE, "learner.islands": ISLANDS}, table="islands"),
    "tools": Row(table="tools", spec="specs/tools.yaml"),
    "smollm2-sums": Row(table="model", spec="specs/smollm2.yaml"),
    "smollm2-stories": Row(
        {
            "data.sources.sums.uri": "problems/stories-train.jsonl",
            "data.sources.sums-held-out.uri": "problems/stories-held-out.jsonl",
        },
        table="model",
        spec="specs/smollm2.yaml",
    ),
}


@dataclass(frozen=True)
class Figures:
    """One run. `first` and `last` are means of ten steps; others, if nothing is said, of all."""

    row: str
    seed: int
    steps: int
    """Fewer than were asked for where the filter left too few groups, and the run stalled."""
    commit: str
    date: str
    machine: str
    task_reward_first: float
    task_reward_last: float
    length_error_first: float | None
    length_error_last: float | None
    held_out_first: float
    """Of the version that the run began with."""
    held_out_last: float
    held_out_low: float
    """Lower end of the 95 % interval of the last."""
    clipped: float
    """Share of tokens outside of the clip, on either side."""
    drift: float
    """|log pi - log pi_old| of a token."""
    lag: float
    grad_norm_max: float
    filtered_groups: int
    """Sum."""
    learner_busy: float
    step_s: float
    """Seconds a step after the tenth."""
    wall_s: float
    cpu_s: str
    """By role: `learner 310; volunteers-0 205`."""
    curve: str
    """Task reward, a mean for each twentieth of the steps."""
    length_curve: str
    """Length error, likewise; empty without targets, and in runs before 2026-11-30."""

    @classmethod
    def of(cls, row: str, seed: int, run: MeasuredRun) -> Figures:
        """The figures of a finished run.

        Raises:
            KeyError: the run has no evaluation `held-out`.
        """
        summary, steps = run.summary, run.metrics
        held_out = summary["evaluations"]["held-out"]
        sides = ("clip_fraction_low", "clip_fraction_high", "clip_fraction_delta")
        steady = steps[min(WARM_UP, len(steps) // 2) :]
        count = min(PARTS, len(steps))
        edges = [len(steps) * part // count for part in range(count + 1)]
        parts = [steps[a:b] for a, b in pairwise(edges)]

        def curve(name: str) -> str:
            values = [[step[name] for step in each if step[name] is not None] for each in parts]
            return " ".join(f"{fmean(each):.3f}" for each in values if each)

        return cls(
            row=row,
            seed=seed,
            steps=summary["steps"],
            commit=subprocess.check_output(DESCRIBE, cwd=ROOT, text=True).strip(),
            date=datetime.now(UTC).date().isoformat(),
            machine=f"{os.cpu_count()} x {platform.machine()}",
            task_reward_first=summary["task_reward_first"],
            task_reward_last=summary["task_reward_last"],
            length_error_first=summary["length_error_first"],
            length_error_last=summary["length_error_last"],
            held_out_first=held_out[0]["mean"][0],
            held_out_last=held_out[-1]["mean"][0],
            held_out_low=held_out[-1]["mean"][1],
            clipped=fmean(sum(step[side] for side in sides) for step in steps),
            drift=fmean(step["policy_drift"] for step in steps),
            lag=summary["mean_lag"],
            grad_norm_max=max(step["grad_norm"] for step in steps),
            filtered_groups=sum(step["filtered_groups"] for step in steps),
            learner_busy=fmean(step["learner_busy_fraction"] for step in steady),
            step_s=(steady[-1]["time"] - steady[0]["time"]) / (len(steady) - 1),
            wall_s=summary["wall_s"],
            cpu_s="; ".join(f"{name} {seconds:.0f}" for name, seconds in sorted(run.cpu_s.items())),
            curve=curve("task_reward"),
            length_curve=curve("length_error"),
        )


def append_run(name: str, seed: int, runs_dir: Path | None) -> None:
    """Runs a row, minutes to an hour on two cores, and adds it to the CSV with four digits."""
    row = ROWS[name]
    changes = {**row.changes, "seed": seed}
    run = measure(f"{name}-{seed}", changes, runs_dir, row.spec, may_stall=True)
    rounded = {
        column: f"{value:.4g}" if isinstance(value, float) else value
        for column, value in asdict(Figures.of(name, seed, run)).items()
    }
    with TABLE.open("a", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rounded), lineterminator="\n")
        if not file.tell():
            writer.writeheader()
        writer.writerow(rounded)


def recorded(*names: str) -> list[dict[str, str]]:
    """The CSV's runs of some rows, in the order of the names."""
    with TABLE.open(encoding="utf-8", newline="") as file:
        runs = list(csv.DictReader(file))
    return [run for name in names for run in runs if run["row"] == name]


COLUMNS = {
    "steps": ("steps",),
    "task reward": ("task_reward_first", "task_reward_last"),
    "length error": ("length_error_first", "length_error_last"),
    "held out": ("held_out_first", "held_out_last"),
    "clipped": ("clipped",),
    "drift": ("drift",),
    "largest gradient": ("grad_norm_max",),
    "s a step": ("step_s",),
}


def table(of: str) -> Iterator[str]:
    """The Markdown table of a kind of rows: each figure's mean over seeds, first to last."""
    yield f"| row | seeds | {' | '.join(COLUMNS)} |"
    yield "|---" * (len(COLUMNS) + 2) + "|"
    for row in (name for name, each in ROWS.items() if each.table == of):
        if runs := recorded(row):
            means = (
                " to ".join(
                    f"{fmean(float(run[name]) for run in runs):.3g}"
                    for name in names
                    if runs[0][name]
                )
                for names in COLUMNS.values()
            )
            yield f"| {row} | {' '.join(run['seed'] for run in runs)} | {' | '.join(means)} |"


def _curves(names: Sequence[str], column: str) -> Iterator[Curve]:
    for run in recorded(*names):
        values = [float(value) for value in run[column].split()]
        width = int(run["steps"]) / len(values)
        points = [((part + 0.5) * width, value) for part, value in enumerate(values)]
        yield Curve(f"{run['row']} {run['seed']}", points, averaged=False)


def _curves_of_run(run_dir: Path) -> Iterator[Curve]:
    rows = read_rows(run_dir)
    yield Curve("task reward", [(row["step"], row["task_reward"]) for row in rows])
    results = read_evaluations(evaluation_files(run_dir))
    for name in sorted({each.evaluation for each in results}):
        own = [each for each in results if each.evaluation == name]
        means = [(each.version, each.figures["mean"]) for each in own]
        band = [(x, mean.low or mean.value, mean.high or mean.value) for x, mean in means]
        points = [(x, mean.value) for x, mean in means]
        yield Curve(f"evaluation {name}", points, averaged=False, band=band)


def write_drawing(path: Path, figure: Figure) -> None:
    """Writes an SVG that a page shows, light or dark."""
    path.write_text(draw(figure).replace("currentColor", GREY), encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.evidence",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    run = commands.add_parser("run", help="runs rows and appends their figures")
    run.add_argument("rows", nargs="+", choices=ROWS, metavar="ROW")
    run.add_argument("--seed", type=int, default=42)
    run.add_argument("--runs-dir", type=Path, help="keeps the runs; a temporary folder else")
    kinds = sorted({row.table for row in ROWS.values()})
    commands.add_parser("table", help="prints a table").add_argument("kind", choices=kinds)
    drawing = commands.add_parser("draw", help="draws the task rewards of rows")
    drawing.add_argument("file", type=Path)
    drawing.add_argument("rows", nargs="+", choices=ROWS, metavar="ROW")
    drawing.add_argument("--lengths", action="store_true", help="length errors instead")
    drawing = commands.add_parser("draw-run", help="draws a run, with its evaluations")
    drawing.add_argument("file", type=Path)
    drawing.add_argument("run_dir", type=Path)
    given = parser.parse_args()
    if given.command == "run":
        for row in given.rows:
            append_run(row, given.seed, given.runs_dir)
    elif given.command == "table":
        print(*table(given.kind), sep="\n")
    elif given.command:
        of_rows = given.command == "draw"
        lengths = of_rows and given.lengths
        column = "length_curve" if lengths else "curve"
        curves = _curves(given.rows, column) if of_rows else _curves_of_run(given.run_dir)
        title = "Length error, tokens" if lengths else "Task reward"
        write_drawing(given.file, Figure(title, "", list(curves), bottom=0.0))
    else:
        for row in ROWS:
            print(row, *(run["seed"] for run in recorded(row)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
