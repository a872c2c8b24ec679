"""Runs benchmarks by name, or all of them: `python -m benchmarks [NAME ...]`. Each prints JSON."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

NAMES = sorted(p.stem for p in Path(__file__).parent.glob("[a-z]*.py") if p.stem != "runs")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(NAMES))
    names = parser.parse_args().names or NAMES
    unknown = sorted(set(names) - set(NAMES))
    if unknown:
        parser.error(f"unknown: {', '.join(unknown)}; there are: {', '.join(NAMES)}")
    # A process each: JAX and vLLM fix their devices and threads when first imported.
    codes = [subprocess.call([sys.executable, "-m", f"benchmarks.{name}"]) for name in names]
    return max(codes)


if __name__ == "__main__":
    raise SystemExit(main())
