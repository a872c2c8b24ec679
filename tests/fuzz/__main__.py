"""`python -m tests.fuzz`: every campaign with many more cases, in batches of a new seed each.

Stops at the first batch that fails and shows it: `--hypothesis-seed` and FUZZ_CASES repeat it.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

FOLDER = Path(__file__).parent
BATCH = 5000


def batch(seed: int, only: str) -> subprocess.CompletedProcess[str]:
    """BATCH cases of each campaign from one seed, in a process of their own."""
    return subprocess.run(
        [
            *(sys.executable, "-m", "pytest", str(FOLDER), "-q", "-x", "-p", "no:cacheprovider"),
            *(f"--hypothesis-seed={seed}", "-k", only, "--timeout", "3600"),
        ],
        env={**os.environ, "FUZZ_CASES": str(BATCH)},
        capture_output=True,
        text=True,
        check=False,
    )


def main() -> int:
    """Runs the batches, says how far it is, and returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--cases", type=int, default=1_000_000, help="of each campaign")
    parser.add_argument("--only", default="", help="campaigns whose names hold this")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="of the first batch")
    options = parser.parse_args()
    batches = -(-options.cases // BATCH)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        seeds = range(options.seed, options.seed + batches)
        running = [pool.submit(batch, seed, options.only) for seed in seeds]
        for done, ended in enumerate(as_completed(running), start=1):
            result = ended.result()
            if result.returncode:
                print(result.stdout[-20_000:], result.stderr[-5_000:])
                pool.shutdown(cancel_futures=True)
                return 1
            print(f"{done * BATCH:,} of {batches * BATCH:,} cases of each campaign", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
