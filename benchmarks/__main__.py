"""Runs benchmarks by name: `python -m benchmarks [NAME ...]`. Each prints JSON.

Without a name all run that take minutes on a laptop. The peers', the compilations for large
slices, the export, which takes 24 GB of disk, and the forged proofs and the attacks, which take
half an hour each, run when they are named; `benchmarks.evidence` is by itself.
`make accelerator` is for GPUs.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

NAMES = sorted(
    p.stem
    for p in Path(__file__).parent.glob("[a-z]*.py")
    if p.stem not in ("evidence", "pictures", "runs", "smollm2")
)
NAMED_ONLY = (
    "attack_detection",
    "bridge_export",
    "estimate_accuracy",
    "learner_peers",
    "ray_backend",
    "toploc_null",
    "weak_scaling",
    "whole_loop",
)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(NAMES))
    names = parser.parse_args().names or [name for name in NAMES if name not in NAMED_ONLY]
    unknown = sorted(set(names) - set(NAMES))
    if unknown:
        parser.error(f"unknown: {', '.join(unknown)}; there are: {', '.join(NAMES)}")
    # A process each: JAX and vLLM fix their devices and threads when first imported.
    codes = [subprocess.call([sys.executable, "-m", f"benchmarks.{name}"]) for name in names]
    return max(codes)


if __name__ == "__main__":
    raise SystemExit(main())
