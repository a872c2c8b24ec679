"""Line plots of a run as SVG: how they are drawn, and which plots the report has.

The SVG takes the text colour of the page, so that light and dark pages both read well.
"""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from itertools import cycle
from statistics import fmean
from typing import Any

from runspec.local.metrics import Row, is_supervised

# Drawn in this colour, then replaced: in SVG `currentColor` is the colour of the text around it.
_INK = "#0a0b0c"
_COLOURS = ("#2f7fc2", "#d9772b", "#3a9d6e", "#b05cc0", "#c2495b", "#8a8f2f")
_SMOOTH = 10
_NOT_AVERAGED = (
    "rejected_rollouts",
    "lag_max",
    "verdict_latency_p99",
    "manifest_latency_p99",
    "held_out_nll",
    "held_out_bits_per_byte",
    "learning_rate",
)
"""Keys of which means over steps would mean nothing."""
SUPERVISED = "Training"
"""Section of plots of runs that train on documents."""


@dataclass(frozen=True)
class Curve:
    label: str
    points: Sequence[tuple[float, float]]
    averaged: bool = True
    """Whether means over ten steps are drawn over the steps; of maxima they would mean nothing."""
    band: Sequence[tuple[float, float, float]] = ()
    """Lower and upper limits by x, filled in."""


@dataclass(frozen=True)
class Figure:
    title: str
    caption: str
    curves: Sequence[Curve]
    bottom: float | None = None
    """Lower end of the y axis; where the data end when None."""
    top: float | None = None
    """The y axis reaches at least this far up."""
    levels: Sequence[float] = ()
    """Horizontal dashed lines, the i-th in the colour of the i-th curve."""
    log: bool = False
    x: str = "step"
    """What the x axis counts."""


def draw(figure: Figure) -> str:
    """The figure as an <svg> element: thin lines are steps, thick ones means over ten of them.

    Only the page draws `top`, `levels` and `log`.
    """
    # Imported here: half a second that only whoever draws should pay. No pyplot: no global state.
    from matplotlib import rc_context
    from matplotlib.figure import Figure as Canvas

    with rc_context({"svg.fonttype": "none", "svg.hashsalt": figure.title, "font.size": 9}):
        canvas = Canvas(figsize=(4.4, 2.6), layout="constrained")
        axes = canvas.subplots()
        for curve, colour in zip(figure.curves, cycle(_COLOURS)):
            xs, ys = [x for x, _ in curve.points], [y for _, y in curve.points]
            label = curve.label or None
            if curve.averaged:
                parts = [ys[max(0, i + 1 - _SMOOTH) : i + 1] for i in range(len(ys))]
                axes.plot(xs, ys, color=colour, linewidth=0.8, alpha=0.45)
                axes.plot(xs, [*map(fmean, parts)], color=colour, linewidth=1.8, label=label)
            else:
                axes.plot(xs, ys, color=colour, linewidth=0.8, label=label)
            if curve.band:
                at, low, high = zip(*curve.band, strict=True)
                axes.fill_between(at, low, high, color=colour, alpha=0.2, linewidth=0)
        if figure.bottom is not None:
            axes.set_ylim(bottom=figure.bottom)
        axes.spines[["top", "right"]].set_visible(False)
        for side in ("left", "bottom"):
            axes.spines[side].set_color(_INK)
            axes.spines[side].set_alpha(0.4)
        axes.tick_params(colors=_INK, labelsize=8)
        axes.grid(True, color=_INK, alpha=0.12, linewidth=0.6)
        axes.set_xlabel(figure.x, color=_INK, fontsize=8)
        if any(curve.label and curve.points for curve in figure.curves):
            axes.legend(frameon=False, fontsize=8, labelcolor=_INK)
        text = io.StringIO()
        canvas.savefig(text, format="svg", transparent=True, metadata={"Date": None})
    svg = text.getvalue()
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    svg = re.sub(r"font: ([\d.]+px) [^;\"]*", r"font: \1 system-ui, sans-serif", svg)
    return svg.replace(_INK, "currentColor")


def figures(rows: Sequence[Row]) -> dict[str, list[Figure]]:
    """Figures by section; those that no row has a number for are left out.

    Args:
        rows: metrics.jsonl, a row a step, in order.
    """
    import tomllib  # only whoever draws should pay for it

    found: dict[str, list[Figure]] = {}
    plots = (resources.files("runspec.local") / "plots.toml").read_text(encoding="utf-8")
    for title, section in tomllib.loads(plots).items():
        if title == SUPERVISED and not any(map(is_supervised, rows)):
            continue
        drawn = []
        for plot in section:
            labels = plot["curves"]
            curves = [curve for key, label in labels.items() for curve in _curves(rows, key, label)]
            levels = [int(curve.label) for curve in curves] if "by_target" in labels else []
            more: dict[str, Any] = plot.get("axis", {})
            drawn.append(Figure(plot["title"], plot["caption"], curves, levels=levels, **more))
        if known := [figure for figure in drawn if any(curve.points for curve in figure.curves)]:
            found[title] = known
    return found


def _curves(rows: Sequence[Row], key: str, label: str) -> list[Curve]:
    """The curve of a key, or one for each target or for each role that was waited for."""
    found = ((row["step"], _value(row, key)) for row in rows)
    known = [(step, value) for step, value in found if value is not None]
    parts = {part for _, value in known if isinstance(value, dict) for part in value}
    if key == "by_target":  # of the steps that had answers for the target
        lengths = {
            target: [(step, (seen.get(target) or {}).get("length_mean")) for step, seen in known]
            for target in sorted(parts, key=int)
        }
        return [
            Curve(target, [(step, mean) for step, mean in means if mean is not None])
            for target, means in lengths.items()
        ]
    if key == "waits":
        return [
            Curve(f"for the {role}", [(step, waits.get(role) or 0.0) for step, waits in known])
            for role in sorted(parts)
        ]
    return [Curve(label, known, averaged=key not in _NOT_AVERAGED)]


def _value(row: Row, key: str) -> Any:
    """Return a row's value; of `islands.KEY` one of its islands' figures, of a list its length."""
    outer, _, inner = key.partition(".")
    value = (row.get(outer) or {}).get(inner) if inner else row.get(key)
    return len(value) if isinstance(value, list) else value
