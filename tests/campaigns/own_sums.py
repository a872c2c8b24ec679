"""A tiny model of one's own learns two-digit sums: `sft` on 500, then GRPO on 3,500 others.

The files are those of `runspec init --template sums`, drawn anew for each seed. The `sft` run goes
on until the model, sampled at temperature 1, is right on .3 to .4 of 500 sums that are in no other
file; then the GRPO run starts from its newest version, and must lift the accuracy by .2. Its time
is said in seconds and in seconds of one core, which hardly depend on what else the machine does.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet

from runspec.cli.init import SECOND_SPEC, SPEC, SUMS_HELD_OUT, data_files, initial_files, write_all

SEEDS = tuple(int(seed) for seed in os.environ.get("SUMS_SEEDS", "0,1,2").split(","))
ACCURACY = (0.3, 0.4)
"""Held-out accuracy at which `sft` ends."""
FIRST, LAST = 12, 60
"""Steps of `sft` before the first look at the accuracy, and at most."""
STEP_GAIN = 0.09
"""Most that a step of `sft` adds to the accuracy, so that no look comes too late."""
GRPO_STEPS = 100
LIFT = 0.2
"""Least gain of accuracy by GRPO."""


def command(*words: str) -> None:
    """Run `python -m WORDS`; its output goes to standard error."""
    print("+", *words, file=sys.stderr, flush=True)
    subprocess.run([sys.executable, "-m", *words], check=True, stdout=sys.stderr)


def apply(spec: Path, seed: int, steps: int, *more: str) -> float:
    """Apply a spec up to a number of steps; return the seconds that it took."""
    begun, words = time.monotonic(), (f"seed={seed}", f"steps={steps}", *more)
    sets = [word for each in words for word in ("--set", each)]
    command("runspec", "apply", str(spec), "--runs-dir", str(spec.parent / "runs"), *sets)
    return time.monotonic() - begun


def cpu_seconds() -> float:
    """Return the CPU seconds of all commands that have ended, and of what they started."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def accuracy(folder: Path, model: Path, samples: int = 2) -> float:
    """Return the share of right samples on the held-out sums, at temperature 1."""
    out = folder / "rates.parquet"
    out.unlink(missing_ok=True)
    words = ["sampler", "solve-rates", str(folder / SECOND_SPEC), "--source", "problems"]
    words += ["--set", "data.sources.problems.uri=held_out.jsonl", "--samples", str(samples)]
    command(*words, "--model", str(model), "--out", str(out))
    rates = pyarrow.parquet.read_table(out)["solve_rate"].to_pylist()
    if len(rates) != SUMS_HELD_OUT or None in rates:
        raise RuntimeError(f"{len(rates)} of {SUMS_HELD_OUT} sums were tried and graded")
    return sum(rates) / len(rates)


def figures(folder: Path, seed: int) -> dict[str, object]:
    """Make both runs.

    Raises:
        RuntimeError: the accuracy after `sft` is never within `ACCURACY`, or GRPO lifts it by less
            than `LIFT`.
    """
    write_all(folder, initial_files("sums", "sums") | data_files(seed), force=False)
    sft_s, steps = 0.0, FIRST
    while True:
        sft_s += apply(folder / SPEC, seed, steps)
        start = folder / "runs" / "sums" / "weights" / f"v{steps}"
        before = accuracy(folder, start)
        print(f"sft, {steps} steps: {before:.3f}", file=sys.stderr, flush=True)
        if before >= ACCURACY[0] or steps == LAST:
            break
        steps = min(steps + max(1, int((ACCURACY[1] - before) / STEP_GAIN)), LAST)
    if not ACCURACY[0] <= before <= ACCURACY[1]:
        raise RuntimeError(f"accuracy {before:.3f} after {steps} steps of sft")
    cpu_s = cpu_seconds()
    grpo_s = apply(folder / SECOND_SPEC, seed, GRPO_STEPS, f"model.hf={start}")
    cpu_s = cpu_seconds() - cpu_s
    after = accuracy(folder, folder / "runs" / "sums-rl" / "weights" / f"v{GRPO_STEPS}")
    found = {
        "steps of sft": steps,
        "accuracy after sft": round(before, 3),
        "after GRPO": round(after, 3),
        "steps": GRPO_STEPS,
        "seconds of sft": round(sft_s),
        "seconds of GRPO": round(grpo_s),
        "of one core": round(cpu_s),
    }
    if after - before < LIFT:
        raise RuntimeError(f"seed {seed}: {found}")
    return found


def seeds() -> Iterator[tuple[str, dict[str, object]]]:
    """Yield the figures of each seed."""
    for seed in SEEDS:
        with tempfile.TemporaryDirectory(prefix="runspec-sums-") as temporary:
            yield f"seed {seed}", figures(Path(temporary), seed)


def run() -> dict[str, dict[str, object]]:
    """Run every seed.

    Returns:
        The figures of each.
    """
    return dict(seeds())
