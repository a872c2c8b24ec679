"""Numbers as people read them, and the figures of a run's learner islands.

The rows of metrics.jsonl are the first island's: its own share, its own waits. Who contributed and
who was dropped is the same for all islands.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

from runspec.core.errors import UserError

_BARS = "▁▂▃▄▅▆▇█"


@contextmanager
def reported(thing: str, place: object, remedy: str, *kinds: type[Exception]) -> Iterator[None]:
    """Raise errors of these kinds as a UserError: `thing`, with what the error says."""
    try:
        yield
    except kinds as error:
        why = error.thing if isinstance(error, UserError) else error
        why = error.strerror or error if isinstance(error, OSError) else why
        raise UserError(f"{thing}: {why}", place=str(place), remedy=remedy) from error


def sparkline(values: Sequence[float], width: int) -> str:
    """A line of bars, each the mean of its share of the values, from the lowest to the highest."""
    if not values:
        return ""
    width = min(width, len(values))
    edges = [i * len(values) // width for i in range(width + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(means), max(means)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((mean - low) * scale)] for mean in means)


def number(value: object, digits: int = 3) -> str:
    """Significant digits; `-` for a figure that is not known."""
    return f"{value:.{digits}g}" if isinstance(value, int | float) else "-"


def share(value: object) -> str:
    """Whole per cent; `-` for a share that is not known."""
    return f"{100 * value:.0f} %" if isinstance(value, int | float) else "-"


def per_second(value: object) -> str:
    return f"{value:,.0f}" if isinstance(value, int | float) else "-"


def duration(seconds: float) -> str:
    """Like 42 s, 3 min 5 s or 2 h 10 min."""
    minutes, rest = divmod(round(seconds), 60)
    if minutes >= 60:
        return f"{minutes // 60} h {minutes % 60} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def seconds(value: object) -> str:
    """A time between fractions of a second and hours; `-` for one that is not known."""
    if not isinstance(value, int | float):
        return "-"
    return f"{value:.2g} s" if value < 10 else duration(value)


def latency(figures: Mapping[str, Any], name: str) -> tuple[str, str]:
    """Median and 99th percentile of a wait, by a step's row or a run's summary.

    Args:
        figures: has `NAME_latency_p50` and `NAME_latency_p99`, in seconds, where they are known.
        name: verdict or manifest.
    """
    return seconds(figures.get(f"{name}_latency_p50")), seconds(figures.get(f"{name}_latency_p99"))


def size(count: float) -> str:
    """Bytes, like 42 B, 3.5 MB or 1.2 TB."""
    amount, units = float(count), ["B", "kB", "MB", "GB", "TB"]
    while amount >= 999.5 and len(units) > 1:
        amount, units = amount / 1000.0, units[1:]
    return f"{amount:.3g} {units[0]}"


_COMPARED = ("share_norm", "cosine")
"""Figures whose first and last values the summary has."""


def island_figures(row: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return what a step's row says of the islands; None for a run with one learner.

    Keys: those of `islands` in the row (docs/learner_jax.md). Besides, of the first island:
    wait_s, seconds that it waited for the exchange; wait_share, their share of the step; busy, the
    share in which it trained. And tokens_per_s, about those of all islands.
    """
    commit = row.get("islands")
    if not isinstance(commit, Mapping):
        return None
    took_s = (row.get("train_s") or 0.0) + (row.get("wait_s") or 0.0)
    waited_s, part, tokens = (row.get("waits") or {}).get("islands"), commit.get("part"), None
    if part and took_s > 0.0 and row.get("tokens") is not None:
        tokens = row["tokens"] / part / took_s  # the islands have tokens as they have weight
    return {
        **commit,
        "wait_s": waited_s,
        "wait_share": waited_s / took_s if waited_s is not None and took_s > 0.0 else None,
        "busy": row.get("learner_busy_fraction"),
        "tokens_per_s": tokens,
    }


def commit_text(row: Mapping[str, Any]) -> str:
    """Return how many islands are in the last commit, and who is not; empty for one learner."""
    figures = island_figures(row)
    if figures is None:
        return ""
    contributors, dropped = figures["contributors"], figures["dropped"]
    without = f" without {', '.join(dropped)}" if dropped else ""
    return f"islands {len(contributors)}/{len(contributors) + len(dropped)}{without}"


def island_pairs(row: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the islands' figures of a step, with their names, for people."""
    figures = island_figures(row)
    if figures is None:
        return []
    names = ", ".join(figures["contributors"]) or "nobody"
    dropped = "; ".join(f"{name}: {why}" for name, why in figures["dropped"].items())
    norm, cosine = number(figures.get("share_norm")), number(figures.get("cosine"))
    sent, received = (_size(figures.get(key)) for key in ("share_bytes", "received_bytes"))
    waited, part = seconds(figures["wait_s"]), share(figures["wait_share"])
    return [
        ("last commit", f"step {figures['step']}, shares of {names}"),
        ("dropped", dropped or "nobody"),
        ("first island's share", f"norm {norm}, cosine to the others' {cosine}"),
        ("bytes", f"{sent} up to each island that fetches it, {received} down"),
        ("exchange", f"waited for {waited} of the step ({part}); busy {share(figures['busy'])}"),
        ("all islands", f"about {per_second(figures['tokens_per_s'])} tokens/s"),
    ]


def missing_text(status: Mapping[str, Any] | None) -> str:
    """Return for whom the islands that have offered a share wait; empty if for nobody.

    Args:
        status: `islands` of the coordinator's status; None if it does not answer.
    """
    if not status or not any(member["offered"] for member in status["members"]):
        return ""  # the wait begins with the first share
    missing = "; ".join(f"{name}: {why}" for name, why in status["waiting_for"].items())
    return f"for the shares of step {status['committed']} ({missing})" if missing else ""


def summarise_islands(
    rows: Sequence[Mapping[str, Any]], *, shares_bytes_sent: int, ends: int
) -> dict[str, Any] | None:
    """Return the islands' part of summary.json; None for a run with one learner.

    Args:
        rows: metrics.jsonl, a row a step, in order.
        shares_bytes_sent: bytes that the servers of shares in the run directory sent.
        ends: rows at either end that are averaged for first and last values.
    """
    known = [(figures, row) for row in rows if (figures := island_figures(row)) is not None]
    if not known:
        return None
    dropped = Counter(name for figures, _ in known for name in figures["dropped"])
    commits = [figures for figures, _ in known]
    took_s = sum((r.get("train_s") or 0.0) + (r.get("wait_s") or 0.0) for _, r in known)
    waited_s = sum(figures["wait_s"] or 0.0 for figures in commits)
    rates = [figures["tokens_per_s"] for figures in commits if figures["tokens_per_s"] is not None]
    means: dict[str, float | None] = {}
    for key in _COMPARED:
        values = [figures[key] for figures in commits if figures.get(key) is not None]
        means |= {f"{key}_first": _mean(values[:ends]), f"{key}_last": _mean(values[-ends:])}
    return {
        "dropped": dict(sorted(dropped.items())),
        "share_bytes": commits[-1].get("share_bytes"),
        "sent_bytes": shares_bytes_sent,
        "received_bytes": sum(figures.get("received_bytes") or 0 for figures in commits),
        **means,
        "wait_share": waited_s / took_s if took_s > 0.0 else None,
        "tokens_per_s": _mean(rates),
    }


def summary_pairs(islands: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return figures of the islands' part of summary.json, with their names, for people."""
    dropped = ", ".join(f"{name} in {steps} steps" for name, steps in islands["dropped"].items())
    sent, received = _size(islands["sent_bytes"]), _size(islands["received_bytes"])
    return [
        ("Islands dropped", dropped or "none"),
        ("An island's share", _size(islands["share_bytes"])),
        ("Shares sent from here / received by the first island", f"{sent} / {received}"),
        ("Waited for the exchange", share(islands["wait_share"])),
        ("All islands, about real tokens/s", per_second(islands["tokens_per_s"])),
    ]


def _size(count: object) -> str:
    return size(count) if isinstance(count, int | float) else "-"


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
