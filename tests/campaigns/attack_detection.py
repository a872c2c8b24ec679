"""Attacks on what is sampled are rejected, honest submissions of other engines are not."""

from __future__ import annotations

from tests.campaigns._benchmark import printed


def run() -> dict[str, dict[str, object]]:
    """False rejections, and the classes that are detected in 99.9 % of the largest submissions."""
    honest, attacks = {}, {}
    for found in printed("attack_detection"):
        for pair, each in found["honest"].items():
            name = f"hidden {found['hidden']}, {pair}:"
            rejected, submissions = each["rejected_submissions"], each["submissions"]
            honest[name] = f"{rejected} of {submissions} rejected"
            rows = [row for row in found["attacks"][pair] if "own" in row]
            seen = [row["own"]["submissions"][-1]["detected"] >= 0.999 for row in rows]
            attacks[name] = f"{sum(seen)} of {len(seen)} classes"
    return {"honest": honest, "attacks": attacks}
