"""Exports an 8 GB checkpoint: peak memory, and throughput beside a plain copy; prints JSON.

    python -m benchmarks.bridge_export [--layers 36] [--stored bfloat16] [--directory DIR]

The model is Qwen3-4B (8.0 GB of bf16, its largest tensor 0.78 GB), random, written leaf by leaf as
`import` does. Each command is a process of its own, timed from start to end; its peak is the
kernel's VmHWM. The copy is of the exported safetensors files, by the kernel within this process,
and synced as the export's are. Both sides run with the page cache emptied of what they read
(`cold`) and full of it (`warm`). DIR needs room for three times the model.

Limits, before anything is measured. Memory: 32 MiB of chunks that are read, two of 8 MiB that are
made and written, and the interpreter with its libraries, 0.1 GB: 0.2 GB, whatever the largest
tensor; the bound is 2.5 of it and 0.3 GB. Speed: a copy reads and writes each byte once. The
export also assembles what it reads (measured here 3.5 GB/s a core), transposes (4 GB/s) and hashes
(5 GB/s) before it writes (3.5 GB/s): 1.0 s of a core for each GB, in threads that run beside one
another. On two cores a disk that takes longer than 0.5 s for a GB is the limit, and the ratio 1.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from bridge.model_files import MODEL_FOLDER
from bridge.orbax_io import write_leaf, write_metadata
from bridge.tensors import dtype_named
from bridge.weight_map import Entry, weight_map
from runspec.core.models.family import named_model, parse_config

MODEL = "Qwen/Qwen3-4B"
BOUND_TENSORS, BOUND_BYTES = 2.5, 300e6
COMMAND = """
import sys
from bridge.__main__ import main
code = main(sys.argv[1:])
lines = dict(line.split(":", 1) for line in open("/proc/self/status"))
print("peak", int(lines["VmHWM"].split()[0]) * 1024)
sys.exit(code)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--stored", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--directory", type=Path, help="on the disk to measure; default: TMPDIR")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.directory) as folder:
        print(json.dumps(measure(Path(folder), options.layers, options.stored)))


def measure(folder: Path, layers: int, stored: str) -> dict[str, Any]:
    """The report of one model; see the module's docstring."""
    fields = {**(named_model(MODEL) or {}), "num_hidden_layers": layers, "dtype": "bfloat16"}
    checkpoint, exported, copied = (folder / name for name in ("checkpoint", "exported", "copied"))
    entries = weight_map(parse_config(fields, place=MODEL))
    write_checkpoint(checkpoint, fields, entries, dtype_named(stored))
    rows = []
    for cache, prepare in (("cold", forget), ("warm", remember)):
        for path in (exported, copied):
            shutil.rmtree(path, ignore_errors=True)
        prepare(checkpoint)
        export = bridge("export", checkpoint, exported)
        prepare(exported)
        copy_s = copy_seconds(exported, copied)
        rows.append({"cache": cache, **export, "copy_s": copy_s, "ratio": copy_s / export["s"]})
    size = sum(path.stat().st_size for path in exported.glob("*.safetensors"))
    shutil.rmtree(copied)
    shutil.rmtree(checkpoint)
    largest = 2 * max(math.prod(entry.hf_shape) for entry in entries)
    return {
        "benchmark": "bridge_export",
        "bytes": size,
        "stored": stored,
        "largest_tensor_bytes": largest,
        "bound_bytes": BOUND_TENSORS * largest + BOUND_BYTES,
        "rows": rows,
        "import": bridge("import", exported, checkpoint),
    }


def write_checkpoint(
    checkpoint: Path, fields: dict[str, Any], entries: list[Entry], dtype: np.dtype
) -> None:
    """Random parameters with their config, as `import` leaves them."""
    rng = np.random.default_rng(0)

    def parts(entry: Entry) -> Iterator[np.ndarray]:
        for _ in range(entry.layers or 1):
            yield rng.standard_normal(entry.shape, np.float32).astype(dtype)

    for entry in entries:
        write_leaf(checkpoint, entry, dtype, parts(entry))
    write_metadata(checkpoint, [entry.path for entry in entries])
    (checkpoint / MODEL_FOLDER).mkdir()
    (checkpoint / MODEL_FOLDER / "config.json").write_text(json.dumps(fields))


def bridge(*arguments: object) -> dict[str, float]:
    """Seconds of the clock and of the processors, and peak bytes, of a command."""
    words = [sys.executable, "-c", COMMAND, *map(str, arguments)]
    begun, used = time.perf_counter(), os.times()
    done = subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True)
    seconds, after = time.perf_counter() - begun, os.times()
    cpu = sum(after[2:4]) - sum(used[2:4])
    return {"s": seconds, "cpu_s": cpu, "peak_bytes": int(done.stdout.split()[-1])}


def copy_seconds(source: Path, target: Path) -> float:
    """Copies the weights into a new directory, and syncs each file."""
    begun = time.perf_counter()
    target.mkdir()
    for file in source.glob("*.safetensors"):
        shutil.copyfile(file, target / file.name)
        with (target / file.name).open("rb") as written:
            os.fsync(written.fileno())
    return time.perf_counter() - begun


def forget(folder: Path) -> None:
    """Drops a folder's files from the page cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def remember(folder: Path) -> None:
    """Reads a folder's files into the page cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb", buffering=0) as file:
                while file.read(2**24):
                    pass


if __name__ == "__main__":
    main()
