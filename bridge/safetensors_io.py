"""safetensors files: a reader that trusts no header, a writer that streams.

The format: 8 bytes little-endian length, a JSON header {name: {dtype, shape, data_offsets}}, then
the tensors' bytes without gaps (https://github.com/huggingface/safetensors). The header is known
before any data is, so tensors are written as they come.

Beside the weights of a version lies `tensors.json`, the records of its tensors for the signed
manifest.
"""

from __future__ import annotations

import math
import operator
import os
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from blake3 import blake3

from bridge.tensors import DTYPES, model_digest, record, tensor_bytes
from bridge.weight_map import file_header
from broadcast.layout import TENSORS_NAME
from runspec.core.canonical import MalformedJson, canonical_json, parse_object
from runspec.core.errors import UserError
from runspec.core.files import read_object, write_atomic

MAX_HEADER_BYTES = 64 * 1024 * 1024
INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
MAX_DIMENSIONS = 8
_READ_BYTES = 1024 * 1024
_SYNCED_BYTES = 64 * 1024 * 1024
_CACHED_BYTES = 256 * 1024
_CODES = {"F32": DTYPES["float32"], "BF16": DTYPES["bfloat16"], "F16": np.dtype(np.float16)}
MAX_RECORDS_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True)
class TensorInfo:
    """Where one tensor lies and what it is."""

    name: str
    file: Path
    dtype: np.dtype
    shape: tuple[int, ...]
    offset: int
    """Offset of its first byte in the file."""

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def read_headers(directory: Path) -> dict[str, TensorInfo]:
    """The tensors of a Hugging Face directory, one file or several with an index.

    Raises:
        UserError: no weights there, a malformed file, a tensor twice, an index that disagrees.
    """
    index = directory / INDEX_NAME
    if not index.exists():
        return read_header(directory / SINGLE_NAME)
    try:
        weight_map = read_object(index, MAX_HEADER_BYTES)["weight_map"]
        files = sorted({str(name) for name in weight_map.values()})
    except (OSError, MalformedJson, KeyError, AttributeError, TypeError) as error:
        raise UserError(f"not a safetensors index: {error}", place=str(index)) from error
    tensors: dict[str, TensorInfo] = {}
    for name in files:
        if Path(name).name != name:
            raise UserError(f"names a file outside its directory: {name!r}", place=str(index))
        for tensor, info in read_header(directory / name).items():
            if weight_map.get(tensor) != name or tensor in tensors:
                raise UserError(f"{tensor} in {name} is not what the index says", place=str(index))
            tensors[tensor] = info
    missing = set(weight_map) - set(tensors)
    if missing:
        raise UserError(f"tensors in no file: {listed(missing)}", place=str(index))
    return tensors


def read_header(path: Path) -> dict[str, TensorInfo]:
    """The tensors of one file. Checks every size against the file's own before any is read.

    Raises:
        UserError: unreadable, not safetensors, truncated, or a dtype that is not in `_CODES`.
    """
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(MAX_HEADER_BYTES, size - 8):
                raise UserError("not a safetensors file: its header is cut off", place=str(path))
            header = parse_object(file.read(length), max_bytes=MAX_HEADER_BYTES)
    except (OSError, MalformedJson) as error:
        raise UserError(
            f"cannot read weights: {error}",
            place=str(path),
            remedy="point at a Hugging Face directory with whole safetensors files",
        ) from error
    header.pop("__metadata__", None)
    return {name: _tensor(name, entry, path, 8 + length, size) for name, entry in header.items()}


def _tensor(name: str, entry: object, path: Path, start: int, size: int) -> TensorInfo:
    try:
        code, shape, (first, last) = (entry[k] for k in ("dtype", "shape", "data_offsets"))  # type: ignore[index]
        naturals = len(shape) <= MAX_DIMENSIONS and all(
            type(n) is int and 0 <= n < 2**48 for n in (*shape, first, last)
        )
        known = code in _CODES
    except (TypeError, KeyError, ValueError) as error:
        raise UserError(f"tensor {name[:200]}: malformed header", place=str(path)) from error
    if not known:
        codes = ", ".join(_CODES)
        raise UserError(
            f"tensor {name[:200]}: dtype {code}, not {codes}",
            place=str(path),
            remedy="convert the weights, for example by transformers' "
            "from_pretrained(MODEL, dtype='float32').save_pretrained(FOLDER)",
        )
    if not naturals:
        raise UserError(f"tensor {name[:200]}: malformed header", place=str(path))
    info = TensorInfo(name, path, _CODES[code], tuple(shape), start + first)
    if last - first != info.nbytes or start + last > size:
        raise UserError(
            f"tensor {name[:200]}: {last - first} bytes at {first}, of shape {shape}: "
            "the file is cut off or its header is wrong",
            place=str(path),
        )
    return info


def read_tensor(info: TensorInfo) -> np.ndarray:
    """Reads one tensor into memory."""
    return read_slice(info, (slice(None),) * len(info.shape))


def read_slice(info: TensorInfo, index: tuple[slice, ...]) -> np.ndarray:
    """Reads the part of a tensor that `index` cuts, and asks for no other byte of the file.

    Args:
        info: where it lies.
        index: a slice of step 1 for each dimension.

    Returns:
        A new C-contiguous array.

    Raises:
        UserError: the file is gone, unreadable or shorter than its header said.
    """
    bounds = [part.indices(size)[:2] for part, size in zip(index, info.shape, strict=True)]
    out = np.empty([max(0, stop - start) for start, stop in bounds], info.dtype)
    # Dimensions after the last one that is cut lie together in the file: a run.
    whole = [length == size for length, size in zip(out.shape, info.shape, strict=True)]
    last_cut = max((axis for axis, full in enumerate(whole) if not full), default=0)
    strides = [math.prod(info.shape[axis + 1 :]) for axis in range(len(info.shape))]
    run = math.prod(out.shape[last_cut:]) * info.dtype.itemsize
    if run == 0 or out.size == 0:
        return out
    first = sum(start * stride for (start, _), stride in zip(bounds, strides, strict=True))
    target = out.reshape(-1).view(np.uint8).data
    with _opened(info) as descriptor:
        for number, outer in enumerate(np.ndindex(out.shape[:last_cut])):
            element = first + sum(map(operator.mul, outer, strides))
            where = info.offset + element * info.dtype.itemsize
            _read_into(descriptor, target[number * run : (number + 1) * run], where, info)
    return out


def stored_record(info: TensorInfo) -> dict[str, Any]:
    """The record {dtype, shape, blake3} of a tensor as it lies in its file.

    Raises:
        UserError: as `stored_digest`.
    """
    return record(info.dtype, info.shape, stored_digest(info))


def stored_digest(info: TensorInfo) -> str:
    """BLAKE3 of a tensor's bytes as they lie in its file, read piece by piece.

    Raises:
        UserError: the file is gone, unreadable or shorter than its header said.
    """
    digest, buffer = blake3(), memoryview(bytearray(min(_READ_BYTES, info.nbytes)))
    with _opened(info) as descriptor:
        for at in range(0, info.nbytes, _READ_BYTES):
            part = buffer[: info.nbytes - at]
            _read_into(descriptor, part, info.offset + at, info)
            digest.update(part)
    return digest.hexdigest()


@contextmanager
def _opened(info: TensorInfo) -> Iterator[int]:
    """The descriptor of a tensor's file; a failed read in the block names the tensor."""
    try:
        with info.file.open("rb", buffering=0) as file:
            yield file.fileno()
    except OSError as error:
        raise UserError(
            f"tensor {info.name}: cannot read: {error.strerror}", place=str(info.file)
        ) from error


def _read_into(descriptor: int, target: memoryview, offset: int, info: TensorInfo) -> None:
    done = 0
    while done < len(target):
        count = os.preadv(descriptor, [target[done:]], offset + done)
        if count == 0:
            raise UserError(
                f"tensor {info.name}: the file became shorter while it was read",
                place=str(info.file),
            )
        done += count


def write_safetensors(
    path: Path,
    shapes: Mapping[str, tuple[int, ...]],
    dtype: np.dtype,
    blocks: Iterable[np.ndarray],
) -> dict[str, dict[str, Any]]:
    """Writes a file header first, then the tensors as they come: one block at a time in memory.

    The bytes are a function of the arguments alone. The file is synced to disk.

    Args:
        path: must not exist.
        shapes: name and shape of every tensor, in the order in which they will come.
        dtype: of all of them.
        blocks: the tensors in that order, each whole, or as 1-D runs of its elements in
            C order.

    Returns:
        The record {dtype, shape, blake3} of each tensor by name.
    """
    code = next(code for code, known in _CODES.items() if known == dtype)
    records, stream = {}, iter(blocks)
    with path.open("xb") as file, ThreadPoolExecutor(1) as thread:
        file.write(file_header(shapes, code, dtype.itemsize))
        synced = 0
        sync: Future[None] | None = None
        for name, shape in shapes.items():
            digest, left = blake3(), math.prod(shape)
            for block in stream:
                left -= block.size
                if block.dtype != dtype or left < 0 or block.shape not in (shape, (block.size,)):
                    raise ValueError(f"{name}: {block.dtype}{block.shape}, not {dtype}{shape}")
                _write(file, digest, tensor_bytes(block))
                if not left:
                    break
            records[name] = record(dtype, shape, digest.hexdigest())
            # The disk works while more is made, so that little is left to sync at the end.
            if file.tell() - synced >= _SYNCED_BYTES and (sync is None or sync.done()):
                if sync is not None:
                    sync.result()
                synced, sync = file.tell(), thread.submit(os.fdatasync, file.fileno())
            if left:
                raise ValueError(f"{name}: {left} elements are missing")
        if sync is not None:
            sync.result()
        file.flush()
        os.fsync(file.fileno())
    return records


def _write(file: IO[bytes], digest: blake3, data: memoryview) -> None:
    """Hashes and writes, bit by bit, while the bytes lie in the processor's cache."""
    for start in range(0, len(data), _CACHED_BYTES):
        part = data[start : start + _CACHED_BYTES]
        digest.update(part)
        file.write(part)


def listed(names: Iterable[str], limit: int = 5) -> str:
    """The first few names, for a message."""
    ordered = sorted(names)
    more = f" and {len(ordered) - limit} more" if len(ordered) > limit else ""
    return ", ".join(ordered[:limit]) + more


def write_records(folder: Path, tensors: Mapping[str, Mapping[str, Any]]) -> None:
    """Writes {"model_digest", "tensors", "files": the names of the safetensors files there}.

    Args:
        folder: of the version, its weights written.
        tensors: record {dtype, shape, blake3} of each tensor by name.
    """
    record = {
        "model_digest": model_digest(tensors),
        "tensors": tensors,
        "files": sorted(path.name for path in folder.glob("*.safetensors")),
    }
    write_atomic(folder / TENSORS_NAME, canonical_json(record))


def wrong_tensor(folder: Path, digests: Mapping[str, str]) -> str | None:
    """Return which tensor of a directory has not its BLAKE3; None where all have. Nothing is read
    whole."""
    try:
        found = read_headers(folder)
    except UserError as error:
        return str(error)
    if found.keys() != digests.keys():
        return f"other tensors: {listed(found.keys() ^ digests.keys())}"
    wrong = (name for name, info in found.items() if stored_digest(info) != digests[name])
    return next((f"tensor {name} is not what was exported" for name in wrong), None)


def recorded_digest(folder: Path) -> str | None:
    """Return the model digest that `write_records` wrote; None where there is none."""
    try:
        return read_object(folder / TENSORS_NAME, MAX_RECORDS_BYTES)["model_digest"]
    except (FileNotFoundError, MalformedJson, KeyError):
        return None


def damage(folder: Path) -> str | None:
    """Return what is wrong with exported weights; None where every tensor has its digest.

    Nothing is read whole.
    """
    try:
        tensors = read_object(folder / TENSORS_NAME, MAX_RECORDS_BYTES)["tensors"]
        return wrong_tensor(folder, {name: record["blake3"] for name, record in tensors.items()})
    except (OSError, MalformedJson, KeyError, TypeError, AttributeError) as error:
        return f"{TENSORS_NAME} cannot be read: {error!r}"
