"""Pools without leased noise: honest submissions pass, chosen tokens and ends are found out."""

from __future__ import annotations

from tests.campaigns._benchmark import printed


def run() -> dict[str, dict[str, object]]:
    """False rejections by precision, and the share of the largest submissions that is rejected."""
    [found] = printed("unseeded_checks")
    honest = {
        f"{name}:": f"{each['rejected_submissions']} of {each['submissions']} rejected"
        for name, each in found["honest"].items()
    }
    last = {name: tables["bfloat16 limits"][-1] for name, tables in found["attacks"].items()}
    attacks = {
        f"{name}:": f"{each['detected']:.1%} of {each['tokens']} tokens"
        for name, each in last.items()
    }
    return {"honest": honest, "attacks": attacks}
