"""Reads Hugging Face directories leaf by leaf, and converts them to Orbax checkpoints and back.

Conversion streams. Versions are compared by digest. Imports neither Orbax nor JAX.
"""

from __future__ import annotations

import itertools
import json
import logging
import math
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import tensorstore as ts

from bridge import safetensors_io
from bridge.delta import apply_deltas, delta_tensors, write_delta
from bridge.model_files import MODEL_FOLDER, copy_model_files, output_directory
from bridge.orbax_io import open_leaves, read_pieces, write_leaf, write_metadata
from bridge.safetensors_io import (
    TensorInfo,
    listed,
    read_slice,
)
from bridge.tensors import contiguous, copy_into, dtype_named
from bridge.weight_map import (
    MAX_SHARD_BYTES,
    Entry,
    Shapes,
    hf_shapes,
    plan_shards,
    tied_tensors,
    weight_map,
)
from bridge.weight_map import Path as LeafPath
from runspec.core.errors import UserError
from runspec.core.files import Folder, last_file, read_bounded
from runspec.core.models import CONFIG_NAME, ModelConfig, read_config
from runspec.core.models.family import load_config

PROBE_NAME = "probe.json"
MAX_PROBE_BYTES = 64 * 1024 * 1024
_LOG = logging.getLogger(__name__)
T = TypeVar("T")


def export_checkpoint(
    orbax_dir: Folder,
    out_dir: Path,
    *,
    model_dir: Path,
    dtype: str,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Writes a checkpoint's parameters as a Hugging Face directory, which appears by one rename.

    Memory: stored chunks of `orbax_io.AHEAD_BYTES` together, or one where they are larger; and
    twice the largest tensor whose chunks are not runs of its bytes, or the largest chunk. The bytes
    written are a function of the parameters, the config and `dtype` alone.

    Args:
        orbax_dir: what `orbax.checkpoint.v1.save` or `import_model` wrote of the parameters.
        out_dir: gets model*.safetensors (+ index where sharded), config.json with the new dtype,
            the tokenizer's files, `probe.json` where one lies beside `orbax_dir`, and
            `tensors.json` {"model_digest", "tensors": {name: {dtype, shape, blake3}}, "files":
            the names of the safetensors files}.
        model_dir: Hugging Face directory with the config and the tokenizer.
        dtype: `float32` or `bfloat16`; wider values are rounded to nearest even.
        max_shard_bytes: weights beyond it are split into several files with an index.

    Raises:
        UserError: unreadable or partial checkpoint, another model's, disk full, `out_dir` exists.
    """
    target = dtype_named(dtype)
    config = load_config(model_dir)
    stores = open_leaves(orbax_dir, {entry.path: entry.leaf_shape for entry in weight_map(config)})
    with output_directory(out_dir) as folder:
        blocks = _one_ahead(_blocks(orbax_dir, stores, config, target))
        shards = plan_shards(dict(hf_shapes(config)), target.itemsize, max_shard_bytes)
        safetensors_io.write_records(folder, _write_weights(folder, shards, target, blocks))
        copy_model_files(model_dir, folder)
        described = read_config(model_dir)
        described.pop("torch_dtype", None)  # the older name of the same field
        _write_json(folder / CONFIG_NAME, {**described, "dtype": dtype})
        probe = last_file(orbax_dir.parent, PROBE_NAME)
        if probe.exists():
            (folder / PROBE_NAME).write_bytes(read_bounded(probe, MAX_PROBE_BYTES))


def _write_weights(
    folder: Path, shards: Sequence[Shapes], dtype: np.dtype, blocks: Iterator[np.ndarray]
) -> dict[str, dict[str, Any]]:
    """Write the safetensors file or files; return each tensor's record by name."""
    records: dict[str, dict[str, Any]] = {}
    index = {}
    for number, shapes in enumerate(shards, 1):
        name = safetensors_io.SINGLE_NAME
        if len(shards) > 1:
            name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        records |= safetensors_io.write_safetensors(folder / name, shapes, dtype, blocks)
        index.update(dict.fromkeys(shapes, name))
        _LOG.info("exported %s: %d tensors", name, len(shapes))
    if len(shards) > 1:
        total = sum(int(np.prod(r["shape"])) for r in records.values()) * dtype.itemsize
        listing = {"metadata": {"total_size": total}, "weight_map": index}
        _write_json(folder / safetensors_io.INDEX_NAME, listing)
    return records


def _blocks(
    orbax_dir: Folder, stores: dict[LeafPath, ts.TensorStore], config: ModelConfig, dtype: np.dtype
) -> Iterator[np.ndarray]:
    """The elements of every Hugging Face tensor in the map's order, cast, in runs of C order.

    A run is what was read at once, where that lacks nothing but rows of the tensor; else a whole
    tensor, put together. They lie in two buffers in turn: good until the next but one is asked for.
    """
    buffers = itertools.cycle([_Buffer(dtype), _Buffer(dtype)])
    tensor = None
    for piece, data in read_pieces(stores, weight_map(config), place=orbax_dir):
        entry, stacked = piece.entry, piece.entry.layers is not None
        index = piece.index[1:] if stacked else piece.index
        for part in data if stacked else [data]:
            if all(part.shape[axis] == entry.shape[axis] for axis in entry.axes[1:]):
                run = next(buffers).array([part.shape[axis] for axis in entry.axes])
                copy_into(run.transpose(entry.inverse_axes()), part.astype(dtype, copy=False))
                yield run.reshape(-1)
                continue
            if tensor is None:
                tensor = next(buffers).array(entry.hf_shape)
            copy_into(entry.to_tree(tensor)[index], part.astype(dtype, copy=False))
            if piece.completes:
                yield tensor
                tensor = None


class _Buffer:
    """Memory that is used again: what is always new costs more than the copy."""

    def __init__(self, dtype: np.dtype) -> None:
        self._memory = np.empty(0, dtype)

    def array(self, shape: Sequence[int]) -> np.ndarray:
        """An array whose elements are whatever they are."""
        size = math.prod(shape)
        if size > self._memory.size:
            self._memory = np.empty(0, self._memory.dtype)  # the old goes before the new comes
            self._memory = np.empty(size, self._memory.dtype)
        return self._memory[:size].reshape(shape)


def _one_ahead(items: Iterator[T]) -> Iterator[T]:
    """The same items; while one is used, the next is made by a thread."""
    with ThreadPoolExecutor(1) as thread:
        upcoming = thread.submit(next, items, None)
        while (item := upcoming.result()) is not None:
            upcoming = thread.submit(next, items, None)
            yield item


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")


def import_model(hf_dir: Path, checkpoint: Path) -> None:
    """Writes a model as an Orbax checkpoint of its parameters, which appears by one rename.

    Memory: a few tensors, each of one layer. The config and the tokenizer go along, into the
    checkpoint's folder `MODEL_FOLDER`, which Orbax passes over.

    Args:
        hf_dir: Hugging Face directory, one safetensors file or several with an index.
        checkpoint: must not exist.

    Raises:
        UserError: unreadable files, tensors that are not the config's, disk full, or `checkpoint`
            exists.
    """
    reader = LeafReader(hf_dir, load_config(hf_dir))
    with output_directory(checkpoint, (OSError, ValueError)) as folder:
        for path, entry in reader.entries.items():
            write_leaf(folder, entry, reader.dtype(path), reader.parts(path))
        write_metadata(folder, reader.entries)
        copy_model_files(hf_dir, folder / MODEL_FOLDER)


def differences(first: Path, second: Path) -> list[str]:
    """Return what differs between the weights of two directories, a line a tensor.

    How the tensors are spread over files does not count. No tensor is read whole.
    """
    a, b = safetensors_io.read_headers(first), safetensors_io.read_headers(second)
    lines = []
    for name in sorted(a.keys() | b.keys()):
        if name not in a or name not in b:
            lines.append(f"{name}: only in {first if name in a else second}")
            continue
        left, right = (safetensors_io.stored_record(tensors[name]) for tensors in (a, b))
        lines += [
            f"{name}: {field} {value} and {right[field]}"
            for field, value in left.items()
            if value != right[field]
        ]
    return lines


def change_report(old: Path, new: Path, out: Path | None) -> list[str]:
    """Return what changed between two directories' weights: a line a tensor, and one of them all.

    Args:
        old, new: Hugging Face directories whose weights lie alike.
        out: gets the delta (`bridge.delta.write_delta`); None: nothing is kept.

    Raises:
        UserError: as `write_delta`.
    """
    with tempfile.TemporaryDirectory() as folder:
        summary = write_delta(old, new, out or Path(folder) / "delta")
    lines = [
        f"{tensor.name}: {tensor.changed} of {tensor.elements} elements, {tensor.nbytes} bytes"
        for tensor in summary.tensors
        if tensor.changed
    ]
    share = 100 * summary.changed / summary.elements
    saved = summary.weights_bytes / summary.delta_bytes
    return [
        *lines,
        f"{summary.changed} of {summary.elements} elements changed ({share:.3g} %): "
        f"{summary.delta_bytes} bytes, {saved:.3g} times fewer than the weights",
    ]


def next_version(base: Path, delta: Path, out: Path) -> None:
    """Apply a delta to a version, and check the digests; the result appears by one rename.

    The config and the tokenizer are the base's; its probe, which is of its own weights, stays.

    Args:
        base: Hugging Face directory that the delta was made against.
        delta: directory of `write_delta`.
        out: must not exist.

    Raises:
        UserError: as `bridge.delta.apply_deltas`; `out` exists, or cannot be written.
    """
    tensors = delta_tensors(base, delta)
    with output_directory(out) as folder:
        copy_model_files(base, folder)
        for path in [*base.glob("*.safetensors"), base / safetensors_io.INDEX_NAME]:
            if path.exists():
                shutil.copyfile(path, folder / path.name)
        apply_deltas(folder, [delta], tensors)
        safetensors_io.write_records(folder, tensors)


_IGNORED = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")
"""Constants that old checkpoints hold; they follow from the config."""
_COMPARED_BYTES = 1 << 24
_REMEDY = "use the config.json that belongs to these weights"


class LeafReader:
    """The leaves of a Hugging Face directory, read when asked for, only the bytes asked for."""

    def __init__(self, hf_dir: Path, config: ModelConfig) -> None:
        """Reads the headers, no weights.

        Args:
            hf_dir: a Hugging Face directory, one safetensors file or several with an index.
            config: its shape (`runspec.core.models.family.load_config`).

        Raises:
            UserError: unreadable files; tensors missing, not expected or of another shape, by name.
        """
        self._tensors = checked_headers(hf_dir, config)
        self.entries: dict[LeafPath, Entry] = {entry.path: entry for entry in weight_map(config)}

    def dtype(self, path: LeafPath) -> np.dtype:
        """The type that a leaf is read in: float32 or `ml_dtypes.bfloat16` as it is stored.

        float16 is read as float32, which has each of its values.

        Raises:
            UserError: its layers differ in type.
        """
        infos = self._infos(path)
        types = {_read_dtype(info.dtype) for info in infos}
        if len(types) != 1:
            raise UserError(
                f"layers of {self.entries[path].hf_name} differ in dtype",
                place=str(infos[0].file.parent),
            )
        return types.pop()

    def read(self, path: LeafPath, index: tuple[slice, ...] | None = None) -> np.ndarray:
        """Reads a leaf, or the part of it that `index` cuts.

        Memory: the part, and one layer of it twice.

        Args:
            path: such as ("layers", "attention", "q", "weight").
            index: a slice of step 1 for each dimension of the leaf, layers first where stacked.

        Returns:
            The part, C-contiguous, in the type of `dtype`.

        Raises:
            UserError: the files cannot be read, with the tensor's name.
        """
        entry, infos, dtype = self.entries[path], self._infos(path), self.dtype(path)
        bounds = index or (slice(None),) * len(entry.leaf_shape)
        if entry.layers is None:
            return contiguous(_read_part(entry, infos[0], bounds))
        chosen = infos[bounds[0]]
        shape = [len(range(n)[part]) for n, part in zip(entry.shape, bounds[1:], strict=True)]
        out = np.empty([len(chosen), *shape], dtype)
        for layer, info in enumerate(chosen):
            copy_into(out[layer], _read_part(entry, info, bounds[1:]))
        return out

    def parts(self, path: LeafPath) -> Iterator[np.ndarray]:
        """Reads a leaf layer by layer; the whole of it, once, where it is not stacked.

        Memory: a layer twice, of which the yielded one is C-contiguous. Errors as `read`.
        """
        entry = self.entries[path]
        for info in self._infos(path):
            yield contiguous(_read_part(entry, info, (slice(None),) * len(entry.shape)))

    def _infos(self, path: LeafPath) -> list[TensorInfo]:
        return [self._tensors[name] for name in self.entries[path].tensor_names()]


def _read_dtype(stored: np.dtype) -> np.dtype:
    return np.dtype(np.float32) if stored == np.float16 else stored


def _read_part(entry: Entry, info: TensorInfo, index: tuple[slice, ...]) -> np.ndarray:
    """The part of one layer of a leaf; a view of what was read.

    A slice of [in..., out...] is one of the tensor's [out..., in...]: its dimensions are split as
    the leaf's are, and moved.
    """
    shape = tuple(entry.shape[axis] for axis in entry.axes)
    split = TensorInfo(info.name, info.file, info.dtype, shape, info.offset)
    part = read_slice(split, tuple(index[axis] for axis in entry.axes))
    part = part.astype(_read_dtype(part.dtype), copy=False)
    return part.transpose(entry.inverse_axes())


def checked_headers(hf_dir: Path, config: ModelConfig) -> dict[str, TensorInfo]:
    """The headers of a model, exactly the tensors that its config asks for.

    A tied model may be stored with the embedding, the head, or both: libraries that store a shared
    tensor once keep either name.

    Raises:
        UserError: as `LeafReader`.
    """
    tensors = safetensors_io.read_headers(hf_dir)
    expected, tied = dict(hf_shapes(config)), tied_tensors(config)
    for name, original in tied.items():
        if name in tensors and original not in tensors:
            tensors[original] = tensors.pop(name)
    if missing := expected.keys() - tensors.keys():
        raise UserError(f"tensors missing: {listed(missing)}", place=str(hf_dir), remedy=_REMEDY)
    unknown = {name for name in tensors.keys() - expected.keys() if not _IGNORED.fullmatch(name)}
    for name, original in tied.items():
        if name in unknown:
            _check_tied(tensors[name], tensors[original])
            unknown.remove(name)
    if unknown:
        raise UserError(f"tensors unexpected: {listed(unknown)}", place=str(hf_dir), remedy=_REMEDY)
    for name, shape in expected.items():
        if tensors[name].shape != shape:
            raise UserError(
                f"tensor {name} has shape {tensors[name].shape}, the config says {shape}",
                place=str(hf_dir),
                remedy=_REMEDY,
            )
    return {name: tensors[name] for name in expected}


def _check_tied(head: TensorInfo, embedding: TensorInfo) -> None:
    """Some tied models are stored with their head: it must be the embedding, bit by bit."""
    same = (head.shape, head.dtype) == (embedding.shape, embedding.dtype) and len(head.shape) == 2
    if same:
        rows = max(1, _COMPARED_BYTES // max(1, head.nbytes // max(1, head.shape[0])))
        for start in range(0, head.shape[0], rows):
            index = (slice(start, start + rows), slice(None))
            a, b = (read_slice(info, index).view(np.uint8) for info in (head, embedding))
            same = same and np.array_equal(a, b)
    if not same:
        raise UserError(
            f"the config ties {head.name} to the embedding, but they differ",
            place=str(head.file),
            remedy="set tie_word_embeddings to false in config.json",
        )
