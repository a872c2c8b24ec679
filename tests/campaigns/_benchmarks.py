"""Campaigns whose figures a benchmark prints: each function is one, and its docstring what it
shows."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def _printed(name: str) -> list[dict[str, Any]]:
    """The JSON objects that a benchmark prints, one a line."""
    command, root = (
        [sys.executable, "-m", f"benchmarks.{name}"],
        Path(__file__).resolve().parents[2],
    )
    done = subprocess.run(command, cwd=root, stdout=subprocess.PIPE, text=True, check=True)
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def attack_detection() -> dict[str, dict[str, object]]:
    """Attacks on what is sampled are rejected, honest submissions of other engines are not.

    Returns:
        False rejections, and the classes that are detected in 99.9 % of the largest submissions.
    """
    honest, attacks = {}, {}
    for found in _printed("attack_detection"):
        for pair, each in found["honest"].items():
            name = f"hidden {found['hidden']}, {pair}:"
            rejected, submissions = each["rejected_submissions"], each["submissions"]
            honest[name] = f"{rejected} of {submissions} rejected"
            rows = [row for row in found["attacks"][pair] if "own" in row]
            seen = [row["own"]["submissions"][-1]["detected"] >= 0.999 for row in rows]
            attacks[name] = f"{sum(seen)} of {len(seen)} classes"
    return {"honest": honest, "attacks": attacks}


def calibration() -> dict[str, object]:
    """Calibrated limits reject no honest submission and see smaller changes of the weights.

    Returns:
        Rejected submissions by the validator's weights, under the profile.
    """
    [found] = _printed("calibration")
    fresh = {name: each["profile"] for name, each in found["fresh"].items()}
    rates = {
        name: (each["rejected_submissions"], each["submissions"]) for name, each in fresh.items()
    }
    return {f"{name}:": f"{rejected} of {all_}" for name, (rejected, all_) in rates.items()}


def forged_proofs() -> dict[str, dict[str, object]]:
    """No forged proof passes where a chunk decides.

    Returns:
        Passes of decided chunks by forgery, for each model.
    """
    return {
        f"hidden {found['hidden']}": {
            name: f"{each['pass_decided']} of {each['decided']}"
            for name, each in found["forgeries"].items()
        }
        for found in _printed("toploc_null")
    }


def unseeded_checks() -> dict[str, dict[str, object]]:
    """Pools without leased noise: honest submissions pass, chosen tokens and ends are found out.

    Returns:
        False rejections by precision, and the share of the largest submissions that is rejected.
    """
    [found] = _printed("unseeded_checks")
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


CAMPAIGNS: dict[str, Callable[[], dict[str, Any]]] = {
    each.__name__: each for each in (attack_detection, calibration, forged_proofs, unseeded_checks)
}
