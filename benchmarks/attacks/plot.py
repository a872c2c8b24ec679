"""Detection against the tokens of a submission, for other weights at several distances."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from typing import Any

DISTANCES = (0.005, 0.01, 0.02, 0.03, 0.05, 0.1)
_COLOURS = ("#2f7fc2", "#3a9d6e", "#8a8f2f", "#d9772b", "#c2495b", "#b05cc0")
_VARIANTS = {
    "own": "claims of its own",
    "validator's": "claims of the leased policy",
    "calibrated": "the same, calibrated",
}


def draw(results: Sequence[dict[str, Any]]) -> str:
    """An SVG of the results of `benchmarks.attack_detection`: a panel for each pair and claim."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure as Canvas

    pairs = list(results[0]["attacks"])
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "attacks", "font.size": 8}):
        canvas = Canvas(
            figsize=(3.2 * len(pairs), 2.6 * len(_VARIANTS)),
            layout="constrained",
            facecolor="white",
        )
        panels = canvas.subplots(len(_VARIANTS), len(pairs), sharex=True, sharey=True)
        for column, pair in enumerate(pairs):
            for line, (variant, words) in enumerate(_VARIANTS.items()):
                axes = panels[line][column]
                _panel(axes, results, pair, variant)
                axes.set_title(f"{pair}, {words}", fontsize=8)
                if line == len(_VARIANTS) - 1:
                    axes.set_xlabel("tokens of the submission")
            panels[0][column].legend(
                fontsize=6, loc="lower right", title="D, nats", title_fontsize=6
            )
        for line in panels:
            line[0].set_ylabel("share rejected")
        text = io.StringIO()
        canvas.savefig(text, format="svg", metadata={"Date": None})
    svg = text.getvalue()
    return re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.DOTALL)


def _panel(axes: Any, results: Sequence[dict[str, Any]], pair: str, variant: str) -> None:
    """A curve for each distance and size: the class of other weights that is nearest to it."""
    for distance, colour in zip(DISTANCES, _COLOURS, strict=True):
        label: str | None = f"{distance:g}"
        for result, style in zip(results, ("-", "--", ":"), strict=False):
            row = nearest(result["attacks"][pair], distance)
            if row is None:
                continue
            table = row[variant]["submissions"]
            axes.plot(
                [entry["tokens"] for entry in table],
                [entry["detected"] for entry in table],
                style,
                color=colour,
                linewidth=1.2,
                label=label,
            )
            label = None
    axes.set_xscale("log")
    axes.set_ylim(-0.03, 1.03)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def nearest(rows: Sequence[dict[str, Any]], distance: float) -> dict[str, Any] | None:
    """Of other weights those whose D is nearest, within a quarter."""
    others = [row for row in rows if row["kind"] == "weights"]
    best = min(others, key=lambda row: abs(row["moved"] - distance))
    return best if abs(best["moved"] / distance - 1) <= 0.25 else None
