"""Between a tree of device arrays and the bridge's flat leaves, at most one leaf on the host."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array

from bridge.load import LeafReader
from bridge.safetensors_io import SINGLE_NAME, write_safetensors
from bridge.tensors import dtype_named
from bridge.weight_map import Entry, weight_map
from learner_jax.distributed import Peers
from learner_jax.model import abstract_params
from learner_jax.sharding import param_shardings
from runspec.core.models.config import ModelConfig

LeafPath = tuple[str, ...]
Index = tuple[slice, ...]
"""Slice of a leaf, with both ends."""
ReadParts = Callable[[LeafPath, Sequence[Index]], Iterator[np.ndarray]]
MESSAGE_BYTES = 256 * 1024 * 1024
"""Most bytes that process 0 reads and sends to the others at once (or one row)."""


def leaf_at(tree: Any, path: LeafPath) -> Any:
    """The leaf of a nested dict at a path of keys."""
    for key in path:
        tree = tree[key]
    return tree


def leaf_path(path: tuple[Any, ...]) -> LeafPath:
    """The keys of a leaf of a nested dict, from JAX's path."""
    return tuple(key.key for key in path)


def load_params(
    model_dir: Path, config: ModelConfig, mesh: Mesh, peers: Peers | None = None
) -> dict[str, Any]:
    """Reads a Hugging Face directory onto the mesh, in the types of `LeafReader.dtype`.

    Of several processes only process 0 reads files; it sends them to the others. Host memory: one
    process has one device's part of one leaf; each of several has its devices' parts of one leaf,
    and `MESSAGE_BYTES`.

    Args:
        model_dir: the directory; of several processes only process 0 has it.
        config: of its model.
        mesh: of all processes.
        peers: the processes of this program, which all call this; None for one.

    Raises:
        UserError: the files are unreadable or are not this model's.
    """
    if peers is None or peers.count == 1:
        read = _files_reader(model_dir, config)
    else:
        read = _FromFirst(model_dir, config, peers)
    shardings = param_shardings(abstract_params(config), mesh)
    loaded = {
        entry.path: _load_leaf(read, entry.path, entry.leaf_shape, leaf_at(shardings, entry.path))
        for entry in weight_map(config)
    }
    return jax.tree.map_with_path(lambda path, _: loaded[leaf_path(path)], shardings)


def _load_leaf(
    read: ReadParts, path: LeafPath, shape: tuple[int, ...], sharding: NamedSharding
) -> Array:
    devices: dict[tuple[tuple[int, int], ...], list[jax.Device]] = {}
    places = sharding.addressable_devices_indices_map(shape)
    for device, index in places.items():
        assert index is not None, "a device of this process has a part"
        bounds = tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))
        devices.setdefault(bounds, []).append(device)
    indices = [tuple(slice(*part) for part in bounds) for bounds in devices]
    arrays: dict[jax.Device, Array] = {}
    for part, holders in zip(read(path, indices), devices.values(), strict=True):
        source: Any = part
        for device in holders:  # read once, and copied from the first device
            source = arrays[device] = jax.device_put(source, device).block_until_ready()
    return jax.make_array_from_single_device_arrays(
        shape, sharding, [arrays[device] for device in places]
    )


def _files_reader(model_dir: Path, config: ModelConfig) -> ReadParts:
    reader = LeafReader(model_dir, config)
    return lambda path, indices: (reader.read(path, index) for index in indices)


class _FromFirst:
    """Reads leaves in process 0 for every process; each keeps the parts that it asks for."""

    def __init__(self, model_dir: Path, config: ModelConfig, peers: Peers) -> None:
        self._model_dir, self._config, self._peers = model_dir, config, peers
        self._shapes = {entry.path: entry.leaf_shape for entry in weight_map(config)}
        self._reader: LeafReader | None = None
        self._dtypes = peers.json_from_first(self._open)

    def __call__(self, path: LeafPath, indices: Sequence[Index]) -> Iterator[np.ndarray]:
        """Collective: the parts of a leaf, C-contiguous."""
        shape, dtype = self._shapes[path], dtype_named(self._dtypes[".".join(path)])
        parts = [np.empty([part.stop - part.start for part in index], dtype) for index in indices]
        for piece in _pieces(shape, dtype.itemsize):
            data = self._peers.from_first(partial(self._read, path, piece))
            array = np.frombuffer(data, dtype).reshape([part.stop - part.start for part in piece])
            for part, index in zip(parts, indices, strict=True):
                _copy_shared(part, index, array, piece)
        return iter(parts)

    def _open(self) -> dict[str, str]:
        reader = self._reader = LeafReader(self._model_dir, self._config)
        return {".".join(path): reader.dtype(path).name for path in self._shapes}

    def _read(self, path: LeafPath, piece: Index) -> bytes:
        assert self._reader is not None, "process 0 opened it"
        return self._reader.read(path, piece).tobytes()


def _pieces(shape: tuple[int, ...], itemsize: int) -> Iterator[Index]:
    """Cuts an array along its first axes into pieces of at most `MESSAGE_BYTES`, or one row."""
    row = itemsize * math.prod(shape[1:])
    if row > MESSAGE_BYTES and len(shape) > 1:
        for start in range(shape[0]):
            for rest in _pieces(shape[1:], itemsize):
                yield (slice(start, start + 1), *rest)
        return
    step = max(1, MESSAGE_BYTES // row)
    for start in range(0, shape[0], step):
        stop = min(start + step, shape[0])
        yield (slice(start, stop), *(slice(0, size) for size in shape[1:]))


def _copy_shared(target: np.ndarray, at: Index, source: np.ndarray, of: Index) -> None:
    """Copies what two parts of one array have in common."""
    both = [(max(a.start, b.start), min(a.stop, b.stop)) for a, b in zip(at, of, strict=True)]
    if all(start < stop for start, stop in both):
        inside, outside = (
            tuple(
                slice(start - part.start, stop - part.start)
                for (start, stop), part in zip(both, index, strict=True)
            )
            for index in (at, of)
        )
        target[inside] = source[outside]


def save_weights(params: Any, config: ModelConfig, directory: Path) -> None:
    """Writes model.safetensors, float32, of a tree of float32 arrays."""
    write_leaves(directory / SINGLE_NAME, weight_map(config), HostLeaves(params))


def write_leaves(
    path: Path, entries: Sequence[Entry], leaves: Mapping[LeafPath, np.ndarray]
) -> None:
    """Writes float32 leaves as the Hugging Face tensors of a safetensors file."""
    shapes = {name: entry.hf_shape for entry in entries for name in entry.tensor_names()}

    def tensors() -> Iterator[np.ndarray]:
        for entry in entries:
            leaf = leaves[entry.path]
            for part in [leaf] if entry.layers is None else leaf:
                yield entry.to_hf(part)

    write_safetensors(path, shapes, dtype_named("float32"), tensors())


class HostLeaves(Mapping[LeafPath, np.ndarray]):
    """A tree of device arrays as flat host arrays, each fetched when it is asked for."""

    def __init__(self, tree: Any) -> None:
        self._leaves = {leaf_path(path): leaf for path, leaf in jax.tree.leaves_with_path(tree)}

    def __getitem__(self, path: LeafPath) -> np.ndarray:
        leaf = self._leaves[path]
        if not leaf.is_fully_addressable:  # then every process asks for it
            leaf = multihost_utils.process_allgather(leaf, tiled=True)
        return np.asarray(leaf)

    def __iter__(self) -> Iterator[LeafPath]:
        return iter(self._leaves)

    def __len__(self) -> int:
        return len(self._leaves)
