"""Numbers as people read them."""

from __future__ import annotations

from runspec.local.text import duration, number, per_second, sparkline


def test_a_sparkline_goes_from_lowest_to_highest() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8) == "▁▂▃▄▅▆▇█"
    assert sparkline([0, 0, 7, 7], 2) == "▁█", "each bar is a mean"
    assert sparkline([5, 5, 5], 8) == "▁▁▁"
    assert sparkline([], 8) == ""


def test_figures_are_short_and_unknown_ones_a_dash() -> None:
    assert (number(0.45678), number(None), per_second(8123.4)) == ("0.457", "-", "8,123")
    assert [duration(s) for s in (42.4, 185, 7801)] == ["42 s", "3 min 5 s", "2 h 10 min"]
