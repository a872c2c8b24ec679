"""Pools without leased noise: honest submissions pass, chosen tokens and ends are found out."""

from __future__ import annotations

from tests.campaigns._benchmark import printed


def run() -> dict[str, dict[str, object]]:
    """False rejections by precision, and the share of the largest submissions that is rejected."""
    [found] = printed("unseeded_checks")
    figures: dict[str, dict[str, object]] = {
        f"honest, {name}": {
            "submissions": each["submissions"],
            "rejected": each["rejected_submissions"],
        }
        for name, each in found["honest"].items()
    }
    for name, tables in found["attacks"].items():
        last = tables["bfloat16 limits"][-1]
        figures[name] = {"tokens": last["tokens"], "rejected": f"{last['detected']:.1%}"}
    return figures
