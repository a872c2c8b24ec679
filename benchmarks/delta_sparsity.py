"""How many published bits a training step changes, in real runs of the laptop profile.

    python -m benchmarks.delta_sparsity [--spec SPEC] [--steps 6] [--lrs 5e-4 3e-7]

For each learning rate the run of the quickstart (0.16M parameters, warm start and all), or of
another spec, for a few steps, at the full rate from the first. The profile publishes float32; the
same versions rounded to nearest even, as an export to bfloat16 rounds them, give the bfloat16
figures. For each step: the share of elements whose bits differ from the version before, and the
bytes of the delta, of them the coded blocks (the header is 130 bytes a tensor), against those of
the weights.

What to expect: AdamW moves an element by up to about the rate `lr` a step, and a bf16 number w lies
|w| / 256 to |w| / 128 from its neighbours. So up to 181 lr / |w| of the elements change their bits:
one in 900 of those around 0.05 at 3e-7, more of the smaller ones; nearly any at 5e-4.
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.runs import SPEC, measure
from bridge.delta import write_delta
from bridge.safetensors_io import SINGLE_NAME, read_headers, read_tensor, write_safetensors
from bridge.tensors import dtype_named


def rounded(version: Path, out: Path, dtype: str) -> None:
    """Writes a version's weights in a type, as an export of the same parameters would."""
    tensors = read_headers(version)
    out.mkdir()
    write_safetensors(
        out / SINGLE_NAME,
        {name: info.shape for name, info in tensors.items()},
        dtype_named(dtype),
        (read_tensor(info).astype(dtype_named(dtype)) for info in tensors.values()),
    )


def step_changes(versions: list[Path], dtype: str, scratch: Path) -> list[dict[str, Any]]:
    """A row a step: what changed between each version and the one before."""
    for version in versions:
        rounded(version, scratch / f"{dtype}-{version.name}", dtype)
    rows = []
    for old, new in pairwise(versions):
        base, target = (scratch / f"{dtype}-{version.name}" for version in (old, new))
        summary = write_delta(base, target, scratch / f"{dtype}-{new.name}-delta")
        rows.append(
            {
                "version": new.name,
                "changed_share": round(summary.changed / summary.elements, 5),
                "delta_bytes": summary.delta_bytes,
                "block_bytes": sum(tensor.nbytes for tensor in summary.tensors),
                "weights_bytes": summary.weights_bytes,
                "ratio": round(summary.weights_bytes / summary.delta_bytes, 2),
            }
        )
    return rows


def sparsity(spec: str, lr: str, steps: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="runspec-sparsity-") as folder:
        name = re.sub(r"\W", "-", f"sparsity-{lr}")
        overrides = {
            "optimizer.lr": lr,
            "optimizer.warmup_updates": 0,
            "steps": steps,
            "broadcast.keep_versions": steps + 1,
        }
        measure(name, overrides, Path(folder), spec)
        weights = (Path(folder) / name / "weights").glob("v*")
        versions = sorted(weights, key=lambda path: int(path.name[1:]))
        median = np.median(
            np.concatenate(
                [np.abs(read_tensor(t)).ravel() for t in read_headers(versions[0]).values()]
            )
        )
        scratch = Path(folder) / "scratch"
        scratch.mkdir()
        return {
            "lr": float(lr),
            "median_weight": round(float(median), 4),
            **{d: step_changes(versions, d, scratch) for d in ("bfloat16", "float32")},
        }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--spec", default=SPEC, help="with a profile `laptop`")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--lrs", nargs="+", default=["5e-4", "3e-7"])
    options = parser.parse_args()
    rows = [sparsity(options.spec, lr, options.steps) for lr in options.lrs]
    print(json.dumps({"benchmark": "delta_sparsity", "runs": rows}, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
