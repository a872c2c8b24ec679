"""Deltas of a model's size mix: bytes, and the speed of writing and applying them.

    python -m benchmarks.delta_codec [--layers 28] [--shares 0.001 0.01 0.05] [--directory /dev/shm]

The tensors are Qwen3-0.6B's (1.2 GB of bf16), normal; a share of the elements, at random places,
moves by one unit in the last place. Gigabytes are of the version's whole weights. `cpu` divides by
CPU seconds: what one core does, whatever else runs; `wall` by the clock. Best of the repeats.

Limits, measured or computed in the same run before anything else:
- writing reads both versions once, and hashes the newer: `compare`, a block-wise comparison of
  words that looks for nothing, of files that it maps as all here do, and `blake3`;
- applying touches the pages that hold a change, nearly all of them: `copy`, out of the weights;
  with digests `blake3` of them;
- bytes: `ratio_limit`, from the entropy of the places (H(p) / p bits a change) and of the two bytes
  of the new values.
Beside it the plain ways: numpy's compare, flatnonzero and fancy index, with 4-byte indices and raw
values; and zstd of the whole new file.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import zstandard

from bridge.delta import (
    apply_deltas,
    open_delta,
    overwrite_file,
    read_layout,
    read_records,
    write_delta,
)
from bridge.delta_file import SUFFIX
from bridge.safetensors_io import SINGLE_NAME, write_safetensors
from bridge.weight_map import hf_shapes
from broadcast.layout import TENSORS_NAME
from runspec.core.canonical import canonical_json, digest_bytes
from runspec.core.models.family import parse_config

BF16 = np.dtype(ml_dtypes.bfloat16)
PIECE = 64 * 1024 * 1024
QWEN3_06B: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rope_theta": 1e6,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
}


def rates(action: Callable[[], object], nbytes: int, repeats: int) -> dict[str, float]:
    """GB/s of CPU time and of the clock, the best of the repeats."""
    cpu, wall = [], []
    for _ in range(repeats):
        begun, used = time.perf_counter(), time.process_time()
        action()
        cpu.append(time.process_time() - used)
        wall.append(time.perf_counter() - begun)
    return {"cpu": round(nbytes / min(cpu) / 1e9, 2), "wall": round(nbytes / min(wall) / 1e9, 2)}


def write_version(directory: Path, shapes: dict[str, tuple[int, ...]], bits: np.ndarray) -> None:
    """A Hugging Face directory's weights and `tensors.json`, as an export writes them."""
    directory.mkdir()
    ends = np.cumsum([math.prod(shape) for shape in shapes.values()])[:-1]
    parts = zip(np.split(bits, ends), shapes.values(), strict=True)
    tensors = (part.view(BF16).reshape(shape) for part, shape in parts)
    write_safetensors(directory / SINGLE_NAME, shapes, BF16, tensors)
    records = read_records(directory, read_layout(directory))
    (directory / TENSORS_NAME).write_bytes(canonical_json({"tensors": records}))


def changed_bits(base: np.ndarray, share: float, rng: np.random.Generator) -> np.ndarray:
    """A copy in which a share of the elements is the next larger or smaller number."""
    new = base.copy()
    count = int(share * len(base))
    where = np.unique(rng.integers(0, len(base), count))
    new[where] += rng.choice(np.array([1, -1], np.int16).view(np.uint16), len(where))
    return new


def limits(base: Path, new: Path, repeats: int) -> dict[str, Any]:
    size = (base / SINGLE_NAME).stat().st_size
    out = np.empty(PIECE // 8, np.uint64)
    differs = np.empty(2**17, np.bool_)

    def words(version: Path) -> np.ndarray:
        data = np.memmap(version / SINGLE_NAME, np.uint8, "r").view(np.ndarray)
        return data[: size // 8 * 8].view(np.uint64)

    def copy() -> None:
        source = words(base)
        for at in range(0, len(source), len(out)):
            piece = source[at : at + len(out)]
            np.copyto(out[: len(piece)], piece)

    def compare() -> None:
        old, other = words(base), words(new)
        for at in range(0, len(old), len(differs)):
            pieces = [side[at : at + len(differs)] for side in (old, other)]
            np.not_equal(*pieces, out=differs[: len(pieces[0])])

    def blake3() -> None:
        digest_bytes(words(base).data.cast("B"))

    actions = {"copy": copy, "compare": compare, "blake3": blake3}
    return {name: rates(action, size, repeats) for name, action in actions.items()}


def entropy(symbols: np.ndarray) -> float:
    """Bits a symbol."""
    shares = np.unique(symbols, return_counts=True)[1] / max(1, len(symbols))
    return float(-(shares * np.log2(shares)).sum())


def ratio_limit(changed: np.ndarray, elements: int) -> float:
    share = len(changed) / elements
    places = -(share * math.log2(share) + (1 - share) * math.log2(1 - share)) / share
    values = entropy(changed >> 8) + entropy(changed & 255)
    return 16 / (share * (places + values))


def relative_ratio(base: np.ndarray, new: np.ndarray, where: np.ndarray) -> float:
    """Full bytes over those of a delta that would say how far each value moved, for information."""
    share = len(where) / len(new)
    places = -(share * math.log2(share) + (1 - share) * math.log2(1 - share)) / share
    return 16 / (share * (places + entropy(new[where] - base[where])))


def plain_numpy(base: Path, new: Path, target: Path, repeats: int) -> dict[str, Any]:
    """Compare, flatnonzero, fancy index over the whole mapped file at once."""
    size = (base / SINGLE_NAME).stat().st_size

    def diff() -> tuple[np.ndarray, np.ndarray]:
        old, other = (np.memmap(path / SINGLE_NAME, np.uint16, "r") for path in (base, new))
        where = np.flatnonzero(old != other).astype(np.uint32)
        return where, other[where]

    where, values = diff()

    def apply() -> None:
        np.memmap(target / SINGLE_NAME, np.uint16, "r+")[where] = values

    return {
        "write_gb_s": rates(diff, size, repeats),
        "apply_gb_s": rates(apply, size, repeats),
        "ratio": round(size / (where.nbytes + values.nbytes), 2),
    }


def plain_zstd(new: Path, level: int) -> dict[str, Any]:
    data = np.memmap(new / SINGLE_NAME, np.uint8, "r")
    packed: list[bytes] = []
    write = rates(
        lambda: packed.append(zstandard.ZstdCompressor(level=level).compress(data)), len(data), 1
    )
    unpack = zstandard.ZstdDecompressor().decompress
    return {
        "level": level,
        "write_gb_s": write,
        "apply_gb_s": rates(lambda: unpack(packed[0]), len(data), 1),
        "ratio": round(len(data) / len(packed[0]), 2),
    }


def measure(
    root: Path, shapes: dict[str, tuple[int, ...]], base: np.ndarray, share: float, repeats: int
) -> dict[str, Any]:
    """One share of changed elements; `root` has the base in `base` and a copy of it in `target`."""
    bits = changed_bits(base, share, np.random.default_rng(1))
    new, target, delta = root / "new", root / "target", root / "delta"
    write_version(new, shapes, bits)
    where = np.flatnonzero(bits != base)
    row: dict[str, Any] = {
        "share": round(len(where) / len(base), 5),
        "limits_gb_s": limits(root / "base", new, repeats),
        "ratio_limit": round(ratio_limit(bits[where], len(base)), 1),
        "ratio_limit_if_relative": round(relative_ratio(base, bits, where), 1),
    }
    del bits, where
    size = (new / SINGLE_NAME).stat().st_size

    def write() -> None:
        shutil.rmtree(delta, ignore_errors=True)
        write_delta(root / "base", new, delta)

    row["write_gb_s"] = rates(write, size, repeats)
    row["ratio"] = round(size / (delta / (SINGLE_NAME + SUFFIX)).stat().st_size, 2)
    (file,) = read_layout(target)
    opened = open_delta(file, delta)
    with ThreadPoolExecutor(1) as pool:
        row["apply_gb_s"] = rates(
            lambda: overwrite_file(file, [opened], lambda *_: None, pool), size, repeats
        )
    records = read_records(new, read_layout(new))
    row["apply_and_digests_gb_s"] = rates(
        lambda: apply_deltas(target, [delta], records), size, repeats
    )
    row["numpy"] = plain_numpy(root / "base", new, target, repeats)
    row["zstd"] = [plain_zstd(new, level) for level in (1, 3)]
    for folder in (new, delta):
        shutil.rmtree(folder)
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--vocabulary", type=int, default=QWEN3_06B["vocab_size"])
    parser.add_argument("--shares", type=float, nargs="+", default=[0.001, 0.01, 0.05])
    parser.add_argument("--directory", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    sizes = {"num_hidden_layers": options.layers, "vocab_size": options.vocabulary}
    shapes = dict(hf_shapes(parse_config({**QWEN3_06B, **sizes}, place="Qwen3-0.6B")))
    elements = sum(math.prod(shape) for shape in shapes.values())
    rng = np.random.default_rng(0)
    base = np.empty(elements, np.uint16)
    for at in range(0, elements, PIECE):
        piece = base[at : at + PIECE]
        numbers = rng.standard_normal(len(piece), np.float32) * np.float32(0.02)
        piece[:] = numbers.astype(BF16).view(np.uint16)
    with tempfile.TemporaryDirectory(prefix="runspec-delta-", dir=options.directory) as folder:
        root = Path(folder)
        write_version(root / "base", shapes, base)
        shutil.copytree(root / "base", root / "target")
        # The target's `tensors.json` says the base; each share makes another version of it.
        (root / "target" / TENSORS_NAME).unlink()
        rows = [measure(root, shapes, base, share, options.repeats) for share in options.shares]
    print(json.dumps({"benchmark": "delta_codec", "bytes": elements * 2, "shares": rows}, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
