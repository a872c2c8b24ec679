"""One run as its page shows it: sections of plain data, each with a revision."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from runspec.core.errors import UserError
from runspec.local.dashboard.rollouts import Rollouts
from runspec.local.dashboard.source import Source
from runspec.local.dashboard.timeline import Timeline
from runspec.local.evaluations import SECTION, evaluation_plots, newest, result_line
from runspec.local.formatting import duration, latency, number, per_second, share
from runspec.local.islands import summary_pairs
from runspec.local.metrics import Row, end_figures, summarise, time_left_s
from runspec.local.plots import Curve, Figure, figures
from verify.formats.evaluation import Evaluated

MAX_POINTS = 1000
"""Points of a curve; those of longer runs are means of neighbours."""
SECTIONS = ("head", "figures", "timeline")
READ_S = 1.0
_UNKNOWN: dict[str, Any] = {"reason": "", "waiting_for": None, "crowd": None}
_UNKNOWN |= {key: [] for key in ("conditions", "roles", "events", "workers", "validators")}
_UNKNOWN |= {"weights_bytes_sent": 0, "shares_bytes_sent": 0}
"""What a source may leave out of a run's head."""


class PageData:
    """A run, brought up to date by `refresh`; answers are ready at once.

    Args:
        source: of the run.
    """

    def __init__(self, source: Source) -> None:
        self.source, self.name = source, source.spec.name
        self.rollouts = Rollouts(source)
        self._timeline, self._seq = Timeline(), 0
        self._sections = dict.fromkeys(SECTIONS, (0, "null"))
        """Revision and JSON by section."""
        self._rows: Sequence[Row] = []
        self._results: Sequence[Evaluated] = []
        """What the figures are of."""
        self.trouble = ""
        """Why the run cannot be read now; empty if it can."""

    def refresh(self, read_s: float = READ_S) -> None:
        """Read what is new. A run that cannot be read now keeps what was read."""
        try:
            self._follow(read_s)
            self.trouble = ""
        except UserError as error:
            self.trouble = f"{error.place}: {error.thing}"

    def _follow(self, read_s: float) -> None:
        for seq, event in self.source.events(self._seq):
            self._timeline.take(event)
            self.rollouts.take(event)
            self._seq = seq
        self.rollouts.read(read_s)
        spec, rows, results = self.source.spec, self.source.rows(), self.source.evaluations()
        now = {**_UNKNOWN, **self.source.head()}
        sent = {key: now.pop(key) for key in ("weights_bytes_sent", "shares_bytes_sent")}
        summary = summarise(rows, wall_s=now["wall_s"], **sent) if rows else None
        head = {
            "name": self.name,
            "kind": spec.algorithm.kind,
            "steps": spec.steps,
            "step": int(rows[-1]["step"]) + 1 if rows else 0,
            "left_s": time_left_s(rows, spec.steps),
            "work": work_line(summary) if summary else "",
            "ends": end_figures(summary) if summary else [],
            "facts": facts(summary) if summary else [],
            "evaluations": [f"{n}, {result_line(r)}" for n, r in newest(results).items()],
            **now,
        }
        self._set("head", head)
        if rows is not self._rows or results != self._results:
            self._rows, self._results = rows, results
            plots = {SECTION: evaluation_plots(results)} if results else {}
            plots |= figures(rows)
            self._set("figures", {title: [*map(plain_figure, of)] for title, of in plots.items()})
        self._set("timeline", self._timeline.spans(rows, results))

    def _set(self, name: str, value: Any) -> None:
        text, (revision, before) = json.dumps(value, separators=(",", ":")), self._sections[name]
        if text != before:
            self._sections[name] = revision + 1, text

    def answer(self, known: Mapping[str, int]) -> str:
        """Return a JSON object of what changed: sections as [revision, value].

        Args:
            known: revision by section that the page has.
        """
        parts = [f'"trouble":{json.dumps(self.trouble)}']
        for name, (revision, text) in self._sections.items():
            if revision > known.get(name, 0):
                parts.append(f'"{name}":[{revision},{text}]')
        since = known.get("rollouts", -1)
        if since < self.rollouts.revision:
            changes = self.rollouts.changes(since)
            text = json.dumps(changes, separators=(",", ":"))
            parts.append(f'"rollouts":[{changes["revision"]},{text}]')
        return "{" + ",".join(parts) + "}"


def work_line(summary: Mapping[str, Any]) -> str:
    """Return what the run has done, as one sentence.

    Args:
        summary: as `metrics.summarise` makes it.
    """
    if "tokens" in summary:
        work = f"{summary['tokens']:,} tokens, {number(summary['epoch'])} epochs"
    else:
        work = f"{summary['rollouts_accepted']:,} rollouts accepted, "
        work += f"{summary['rollouts_rejected']:,} rejected"
    return f"{summary['steps']} steps in {duration(summary['wall_s'])}, {work}."


def facts(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return name and value of the figures of a summary that are no curve's ends."""
    if "tokens" in summary:
        of_kind = [
            ("Trained tokens", f"{summary['trained_tokens']:,}"),
            ("Padding", share(summary["padding_share"])),
            ("Learner waited for input", share(summary["input_wait_share"])),
        ]
    else:
        of_kind = [
            ("Mean lag", number(summary["mean_lag"])),
            ("Largest lag", number(summary["max_lag"])),
            ("Samplers busy", share(summary["sampler_busy_fraction"])),
            ("Submission to verdict, p50 / p99 of a step", " / ".join(latency(summary, "verdict"))),
            ("Submission to batch, p50 / p99 of a step", " / ".join(latency(summary, "manifest"))),
        ]
    return [
        *of_kind,
        ("Learner busy", share(summary["learner_busy_fraction"])),
        ("Learner, real tokens/s", per_second(summary["learner_tokens_per_s"])),
        ("Learner, MFU", share(summary["mfu"])),
        ("Updates skipped", number(summary["skipped_updates"])),
        ("Weights sent", f"{summary['weights_bytes_sent'] / 1e6:,.1f} MB"),
        *(summary_pairs(summary["islands"]) if summary["islands"] else ()),
    ]


def plain_figure(figure: Figure) -> dict[str, Any]:
    """Return a figure as plain data for the page."""
    return {
        "title": figure.title,
        "caption": figure.caption,
        "bottom": figure.bottom,
        "top": figure.top,
        "levels": list(figure.levels),
        "log": figure.log,
        "curves": [_curve(curve) for curve in figure.curves],
    }


def _curve(curve: Curve) -> dict[str, Any]:
    points = curve.points
    if len(points) > MAX_POINTS:  # each is the mean of its share of neighbours, at the last x
        edges = [i * len(points) // MAX_POINTS for i in range(MAX_POINTS + 1)]
        parts = [points[a:b] for a, b in pairwise(edges)]
        points = [(part[-1][0], sum(y for _, y in part) / len(part)) for part in parts]
    return {
        "label": curve.label,
        "x": [x for x, _ in points],
        "y": [_rounded(y) for _, y in points],
        "averaged": curve.averaged,
        "band": [[x, _rounded(low), _rounded(high)] for x, low, high in curve.band],
    }


def _rounded(value: float) -> float:
    return float(f"{value:.5g}")
