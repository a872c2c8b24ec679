"""What every side of the learner's benchmark does: warm up, time updates, say what it took.

Imported by programs that run in the peers' environments: standard library and numpy only.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

WARM_UP = 2
Step = Callable[[], tuple[float, float]]
"""One full update -> (loss, norm of its gradient before clipping), both on the host."""


def run_side(name: str, make_step: Callable[[Path, dict[str, Any], Any], Step]) -> None:
    """`<program> FOLDER REPEATS`: prints one JSON object.

    Two updates warm up (some compile the second anew); their seconds beyond those of two later ones
    are called compilation. CPU seconds are of all threads.
    """
    folder, repeats = Path(sys.argv[1]), int(sys.argv[2])
    settings = json.loads((folder / "case.json").read_text())
    with np.load(folder / "batch.npz") as batch:
        step = make_step(folder, settings, dict(batch))
    results, seconds, cpu = [], [], []
    for _ in range(WARM_UP + repeats):
        begun, used = time.perf_counter(), time.process_time()
        results.append(step())
        seconds.append(time.perf_counter() - begun)
        cpu.append(time.process_time() - used)
        print(f"{name}: {seconds[-1]:.2f} s, CPU {cpu[-1]:.2f} s", file=sys.stderr, flush=True)
    typical = float(np.median(seconds[WARM_UP:]))
    print(
        json.dumps(
            {
                "first": {"loss": results[0][0], "grad_norm": results[0][1]},
                "compile_s": sum(seconds[:WARM_UP]) - WARM_UP * typical,
                "seconds": seconds[WARM_UP:],
                "cpu_seconds": cpu[WARM_UP:],
                "peak_rss_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6,
            }
        )
    )
