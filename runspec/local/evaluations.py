"""The evaluations of a run, as people and programs see them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from runspec.core.run_files import evaluation_files
from runspec.core.schema import RunSpec
from runspec.local.formatting import number
from runspec.local.metrics import Row
from runspec.local.plots import Curve, Figure
from verify.formats.evaluation import Evaluated, read_evaluations
from verify.formats.evaluation import Figure as Mean

SECTION = "Evaluations"
HELD_OUT, LOSS = "held-out", "loss"
"""Evaluation of runs that train on documents, and its figure in nats a token."""
_TITLES = {
    LOSS: ("loss", "Mean loss of a held-out token, in nats"),
    "bits-per-byte": ("bits a byte", "Loss of the held-out documents over their bytes"),
    "mean": ("task reward", "Mean task reward of all answers"),
    "pass": ("pass@k", "Chance that one of k answers solves a problem"),
    "majority": ("majority", "Task reward of the most frequent answer to a problem"),
    "length": ("length", "Mean output in tokens, the end token included"),
    "length-error": ("length error", "Mean distance from the length asked for, in tokens"),
}
"""Title and caption by figure."""


def results_of(run_dir: Path, rows: Iterable[Row]) -> list[Evaluated]:
    """Return a run's results in the order of versions.

    They are those of the evaluator, or, in a run that trains on documents, what the learner
    measured on the documents of `algorithm.held_out`, in the same form. Nobody signed that.

    Args:
        run_dir: of the run.
        rows: of metrics.jsonl.

    Raises:
        UserError: a file is not a result.
    """
    found = read_evaluations(evaluation_files(run_dir))
    for row in rows:
        if row.get("held_out_nll") is not None:
            values = {LOSS: row["held_out_nll"], "bits-per-byte": row["held_out_bits_per_byte"]}
            figures = {name: Mean(value, None, None) for name, value in values.items()}
            at = (run_dir.name, HELD_OUT, row["version"], None)
            found.append(Evaluated(*at, figures, 0, [], row["time"], wall_s=0.0, cpu_s=0.0))
    return found


def evaluation_names(spec: RunSpec) -> list[str]:
    """Return the names of a run's evaluations."""
    if spec.supervised is not None:
        return [HELD_OUT] if spec.supervised.held_out.tokens else []
    return [each.name for each in spec.evaluations]


def main_figure(result: Evaluated) -> str:
    """Return the figure that stands for a result."""
    return LOSS if LOSS in result.figures else "mean"


def newest(results: Sequence[Evaluated]) -> dict[str, Evaluated]:
    """Return the result of the newest version, by evaluation; results are in order of versions."""
    return {result.evaluation: result for result in results}


def result_line(result: Evaluated) -> str:
    """Return a result as one line."""
    parts = []
    for name in _in_order(result.figures):
        mean = result.figures[name]
        ends = "" if mean.low is None else f" ({number(mean.low)} to {number(mean.high)})"
        parts.append(f"{name} {number(mean.value)}{ends}")
    if result.faults:
        parts.append(f"{result.faults} answers without a grade")
    return f"version {result.version}: {', '.join(parts) or 'no answer was graded'}"


def _in_order(names: Iterable[str]) -> list[str]:
    """Return names of figures in the order of `_TITLES`, and by K."""
    kinds = list(_TITLES)

    def place(name: str) -> tuple[int, int]:
        kind, _, k = name.partition("-")
        kind, k = (kind, k) if k.isdecimal() else (name, "0")
        return kinds.index(kind) if kind in kinds else len(kinds), int(k)

    return sorted(names, key=place)


def summarise_evaluations(results: Sequence[Evaluated]) -> dict[str, Any]:
    """Return `evaluations` of summary.json: each with its versions, in order."""
    found: dict[str, list[dict[str, Any]]] = {}
    for each in results:
        figures = {name: [mean.value, mean.low, mean.high] for name, mean in each.figures.items()}
        row: dict[str, Any] = {"version": each.version, **figures}
        if LOSS not in figures:  # answers were graded
            row |= {"faults": each.faults, "cpu_s": each.cpu_s}
        found.setdefault(each.evaluation, []).append(row)
    return found


def evaluation_plots(results: Sequence[Evaluated]) -> list[Figure]:
    """Return the plots of all evaluations over versions, with their 95 % intervals."""
    found = []
    for evaluation in dict.fromkeys(result.evaluation for result in results):
        own = [result for result in results if result.evaluation == evaluation]
        for kind, (title, caption) in _TITLES.items():
            if curves := list(_curves(own, kind)):
                bottom = 0.0 if kind.startswith("length") else None
                text = f"{caption}; bands are 95 % intervals over problems."
                found.append(Figure(f"{evaluation}: {title}", text, curves, bottom))
    return found


def _curves(results: Sequence[Evaluated], kind: str) -> Iterator[Curve]:
    names = dict.fromkeys(name for result in results for name in result.figures)
    for name in _in_order(names):
        if name == kind or (kind == "pass" and name.startswith("pass-")):
            known = [(r.version, r.figures[name]) for r in results if name in r.figures]
            yield Curve(
                name if kind == "pass" else "",
                [(version, mean.value) for version, mean in known],
                averaged=False,
                band=[
                    (version, mean.low, mean.high)
                    for version, mean in known
                    if mean.low is not None and mean.high is not None
                ],
            )
