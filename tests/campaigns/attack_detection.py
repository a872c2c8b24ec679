"""Attacks on what is sampled are rejected, honest submissions of other engines are not."""

from __future__ import annotations

from tests.campaigns._benchmark import printed


def run() -> dict[str, dict[str, object]]:
    """False rejections, and the classes that are rejected nearly always, by model and pair."""
    figures: dict[str, dict[str, object]] = {}
    for found in printed("attack_detection"):
        for pair, honest in found["honest"].items():
            rows = [row for row in found["attacks"][pair] if "own" in row]
            largest = [row["own"]["submissions"][-1]["detected"] for row in rows]
            figures[f"hidden {found['hidden']}, {pair}"] = {
                "honest submissions": honest["submissions"],
                "rejected": honest["rejected_submissions"],
                "classes of attacks": len(rows),
                "detected in 99.9 %": sum(share >= 0.999 for share in largest),
            }
    return figures
