"""Three learner updates equal torch's: loss, gradient norm, clip and AdamW."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from itertools import starmap
from typing import Any

ON_CPU = {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": ""}


def run() -> dict[str, object]:
    """The largest relative differences, in float32 on a CPU.

    Raises:
        AssertionError: one is above 1e-5.
    """
    found = both_sides()
    updates = list(zip(*(found[side]["numbers"] for side in ("update", "torch_side")), strict=True))

    def differences(name: str) -> list[float]:
        return list(starmap(lambda a, b: abs(a[name] / b[name] - 1), updates))

    largest = {name: max(differences(name)) for name in ("loss", "grad_norm")}
    assert all(value < 1e-5 for value in largest.values()), largest
    return {"updates": len(updates), **{name: f"{value:.1e}" for name, value in largest.items()}}


def both_sides() -> dict[str, Any]:
    """What `benchmarks.accelerator`'s two sides print, in float32 and from the same weights."""
    from benchmarks.accelerator.case import LAYERS, Case

    case = Case("tiny", LAYERS["tiny"], tokens=256, dtype="float32", repeats=2)
    found = {}
    with tempfile.TemporaryDirectory() as weights:
        for side in ("update", "torch_side"):
            command = [sys.executable, "-m", f"benchmarks.accelerator.{side}", *case.arguments()]
            done = subprocess.run(
                [*command, "--weights", weights],
                env=os.environ | ON_CPU,
                stdout=subprocess.PIPE,
                text=True,
                timeout=200,
                check=True,
            )
            found[side] = json.loads(done.stdout.splitlines()[-1])
    return found
