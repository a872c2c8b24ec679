"""Numbers as people read them."""

from __future__ import annotations

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
    """Like 42 s, 3 min 5 s, 2 h 10 min or 4.2 days."""
    if seconds >= 2 * 86400:
        return f"{seconds / 86400:.3g} days"
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
