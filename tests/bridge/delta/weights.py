"""Small versions of weights, what a delta must make of them, and deltas as nobody writes them."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import ml_dtypes
import numpy as np
import zstandard

from bridge.delta import Records, read_layout, read_records
from bridge.delta_file import FULL, SPARSE, SUFFIX, DeltaHeader, DeltaTensor
from bridge.safetensors_io import INDEX_NAME, SINGLE_NAME
from bridge.tensors import model_digest

BF16, F32 = np.dtype(ml_dtypes.bfloat16), np.dtype(np.float32)
CODES = {BF16: "BF16", F32: "F32"}
Tensors = Mapping[str, np.ndarray]


def bits(array: np.ndarray) -> np.ndarray:
    """[elements] what is stored of an array, as unsigned integers that share its memory."""
    return array.reshape(-1).view(f"u{array.itemsize}")


def normal(rng: np.random.Generator, shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
    return (rng.standard_normal(shape, np.float32) * np.float32(0.02)).astype(dtype)


def nudged(rng: np.random.Generator, tensors: Tensors, share: float) -> dict[str, np.ndarray]:
    """The next version: a share of the elements moves by one unit in the last place."""
    after = {}
    for name, tensor in tensors.items():
        after[name] = tensor.copy()
        moved = rng.random(tensor.size) < share
        bits(after[name])[moved] += rng.choice(np.array([1, 2**16 - 1], np.uint16), moved.sum())
    return after


def write_weights(directory: Path, tensors: Tensors, files: int = 1) -> Path:
    """A directory's safetensors, any types mixed, over one file or several with an index."""
    directory.mkdir(parents=True)
    names = list(tensors)
    size = math.ceil(len(names) / files)
    index = {}
    for number in range(files):
        part = {name: tensors[name] for name in names[number * size : (number + 1) * size]}
        file = SINGLE_NAME if files == 1 else f"model-{number + 1:05d}-of-{files:05d}.safetensors"
        (directory / file).write_bytes(safetensors(part))
        index.update(dict.fromkeys(part, file))
    if files > 1:
        (directory / INDEX_NAME).write_text(json.dumps({"weight_map": index}))
    return directory


def safetensors(tensors: Tensors) -> bytes:
    header: dict[str, object] = {}
    at = 0
    for name, tensor in tensors.items():
        places = [at, at + tensor.nbytes]
        header[name] = {
            "dtype": CODES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": places,
        }
        at += tensor.nbytes
    text = json.dumps(header).encode()
    data = b"".join(bits(tensor).tobytes() for tensor in tensors.values())
    return len(text).to_bytes(8, "little") + text + data


def records(directory: Path) -> Records:
    """The tensors' records of what lies in a directory."""
    return read_records(directory, read_layout(directory))


def weights_of(directory: Path) -> dict[str, bytes]:
    """All bytes of a directory's safetensors files, by name."""
    return {path.name: path.read_bytes() for path in sorted(directory.glob("*.safetensors"))}


def write_blocks(folder: Path, base: Path, target: Path, blocks: Mapping[str, bytes]) -> Path:
    """A delta with a sound header, from `base` to `target` of one file, and any blocks."""
    names, header = sound_header(base, target)
    sizes = {name: replace(header.tensors[name], nbytes=len(blocks[name])) for name in names}
    folder.mkdir(exist_ok=True)
    data = replace(header, tensors=sizes).encode() + b"".join(blocks[name] for name in names)
    (folder / (SINGLE_NAME + SUFFIX)).write_bytes(data)
    return folder


@cache
def sound_header(base: Path, target: Path) -> tuple[list[str], DeltaHeader]:
    """Names in the order of the weights file, and a header that lacks the blocks' sizes."""
    (file,) = read_layout(base)
    wanted = records(target)
    digests = model_digest(records(base)), model_digest(wanted), file.digest
    tensors = {name: DeltaTensor(record["blake3"], 0) for name, record in wanted.items()}
    return [info.name for info in file.tensors], DeltaHeader(*digests, tensors)


def u32(number: int) -> bytes:
    return number.to_bytes(4, "little")


def raw(data: bytes) -> bytes:
    """A stream as it is."""
    return u32(len(data)) + data


def packed(data: bytes, **options: int) -> bytes:
    """A stream as a zstd frame, be it longer."""
    return raw(zstandard.ZstdCompressor(**options).compress(data))


def sparse(changed: int, symbols: int, shift: int, *streams: bytes) -> bytes:
    """A sparse segment."""
    return bytes([SPARSE]) + u32(changed) + u32(symbols) + bytes([shift]) + b"".join(streams)


def full(*planes: bytes) -> bytes:
    """A full segment."""
    return bytes([FULL]) + b"".join(planes)
