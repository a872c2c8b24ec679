"""Between trees of device arrays and stored leaves: Hugging Face files, or an object store.

Of Hugging Face files at most one leaf is on the host. In an object store a tree is zarr3 in Orbax's
layout, by TensorStore's own drivers: Orbax 0.12 writes to disks and to gs:// only. What is written
here Orbax reads, once it is copied to a disk. An object is one chunk with its checksum (crc32c),
which TensorStore compares whenever it reads. A chunk lies inside the part of one device, so no two
processes write to one object.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import tensorstore as ts
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array

from bridge.conversion import LeafReader
from bridge.orbax_io import CHUNK_BYTES, TREE_NAME, leaf_paths, leaf_spec, write_metadata
from bridge.safetensors_io import SINGLE_NAME, write_safetensors
from bridge.tensors import dtype_named
from bridge.weight_map import Entry, weight_map
from learner_jax.distributed import Peers
from learner_jax.model import abstract_params
from learner_jax.sharding import param_shardings
from runspec.core.errors import UserError
from runspec.core.files import ObjectPath
from runspec.core.models import ModelConfig

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


_CODECS = [
    {"name": "bytes", "configuration": {"endian": "little"}},
    {"name": "crc32c"},
]
_DONE = "done"
"""Folder of a checkpoint in which each process but the first says that it has written its part."""
_POLL_S = 0.1
DEADLINE_S = 3600.0
"""How long one checkpoint may take."""


@dataclass(frozen=True)
class HostLeaf:
    """The parts of an array that this process writes."""

    keys: tuple[str | int, ...]
    """Its path in the tree; numbers are positions in a tuple."""
    shape: tuple[int, ...]
    dtype: np.dtype
    chunk: list[int]
    parts: list[tuple[tuple[slice, ...], np.ndarray]]
    """Each with its place in the array."""


def copy_to_host(tree: Any) -> list[HostLeaf]:
    """Copies what this process writes of a tree of arrays.

    Of a part that several devices hold, the process with its first replica writes it.
    """
    flat = jax.tree_util.tree_leaves_with_path(tree)
    for _, leaf in flat:
        for shard in _own(leaf):
            shard.data.copy_to_host_async()
    return [_copied(_keys(path), leaf) for path, leaf in flat]


def host_leaf(name: str, array: np.ndarray) -> HostLeaf:
    """Describes an array in this process's memory, cut along its first axis."""
    row = array.itemsize * math.prod(array.shape[1:])
    chunk = [min(array.shape[0], max(1, CHUNK_BYTES // row)), *array.shape[1:]]
    whole = tuple(slice(0, size) for size in array.shape)
    return HostLeaf((name,), array.shape, array.dtype, chunk, [(whole, array)])


def write_arrays(folder: ObjectPath, leaves: Sequence[HostLeaf]) -> None:
    """Writes this process's parts as <folder>/state/<leaf>; process 0 also the metadata.

    Raises:
        ValueError, UserError: the store does not take them.
    """
    opening = [
        ts.open(
            {**_spec(folder, leaf.keys), "metadata": {"codecs": _CODECS}},
            create=True,
            open=True,
            dtype=ts.dtype(leaf.dtype),
            shape=leaf.shape,
            chunk_layout=ts.ChunkLayout(chunk_shape=leaf.chunk),
        )
        for leaf in leaves
    ]
    writing = [
        store.result(timeout=DEADLINE_S)[index].write(
            part, can_reference_source_data_indefinitely=True
        )
        for store, leaf in zip(opening, leaves, strict=True)
        for index, part in leaf.parts
    ]
    for write in writing:
        write.result(timeout=DEADLINE_S)
    if jax.process_index() == 0:
        write_metadata(folder, (leaf.keys for leaf in leaves), ocdbt=False)


def await_all(checkpoint: ObjectPath) -> bool:
    """Says that this process has written its part of a checkpoint.

    Returns:
        Whether this is process 0, which waits until all have.

    Raises:
        UserError: another has not in time.
    """
    done = checkpoint / _DONE
    if jax.process_index() != 0:
        (done / str(jax.process_index())).write(b"")
        return False
    others, until = jax.process_count() - 1, time.monotonic() + DEADLINE_S
    while others and len(done.names()) < others:
        if time.monotonic() > until:
            raise UserError(
                f"not all of {others} other processes wrote their parts in {DEADLINE_S:.0f} s",
                place=str(checkpoint),
                remedy="see their logs, then start all of them again",
            )
        time.sleep(_POLL_S)
    return True


def load_arrays(folder: ObjectPath, target: Any) -> Any:
    """Reads a tree onto the shardings of `target`; each process reads what its devices hold.

    Args:
        folder: what `write_arrays` wrote.
        target: tree of arrays or of jax.ShapeDtypeStruct.

    Raises:
        ValueError, UserError: other leaves, shapes or types, named; or data missing or damaged.
    """
    flat, structure = jax.tree_util.tree_flatten_with_path(target)
    wanted = {tuple(map(str, _keys(path))): leaf for path, leaf in flat}
    for names in sorted(wanted.keys() ^ set(leaf_paths(folder / TREE_NAME))):
        where = "this run" if names in wanted else "the checkpoint"
        raise ValueError(f"{'/'.join(names)} is only in {where}")
    opening = [ts.open(_spec(folder, names), open=True, read=True) for names in wanted]
    arrays = [
        _read(store.result(timeout=DEADLINE_S), "/".join(names), leaf)
        for store, (names, leaf) in zip(opening, wanted.items(), strict=True)
    ]
    return jax.tree_util.tree_unflatten(structure, arrays)


def load_host_array(
    folder: ObjectPath, name: str, shape: tuple[int, ...], dtype: np.dtype
) -> np.ndarray:
    """Reads one array of those that `write_arrays` wrote.

    Raises:
        ValueError, UserError: another shape or type; or data missing or damaged.
    """
    store = ts.open(_spec(folder, (name,)), open=True, read=True).result(timeout=DEADLINE_S)
    _check_kind(store, name, shape, dtype)
    return store.read().result(timeout=DEADLINE_S)


def _check_kind(store: ts.TensorStore, name: str, shape: tuple[int, ...], dtype: np.dtype) -> None:
    found, wanted = f"{store.dtype.name}{tuple(store.shape)}", f"{dtype}{tuple(shape)}"
    if found != wanted:
        raise ValueError(f"{name} is {found} there, {wanted} in this run")


def _read(store: ts.TensorStore, name: str, leaf: Any) -> jax.Array:
    _check_kind(store, name, leaf.shape, leaf.dtype)
    places = leaf.sharding.addressable_devices_indices_map(leaf.shape).values()
    reading = {key: store[index].read() for key, index in {str(i): i for i in places}.items()}
    return jax.make_array_from_callback(
        leaf.shape, leaf.sharding, lambda index: reading[str(index)].result(timeout=DEADLINE_S)
    )


def _copied(keys: tuple[str | int, ...], leaf: jax.Array) -> HostLeaf:
    shard = leaf.sharding.shard_shape(leaf.shape)
    chunk = _chunk_shape(shard, leaf.dtype.itemsize, stacked="layers" in keys)
    # On a CPU the host's view is the array itself, whose memory the next step may reuse.
    copy = np.array if next(iter(leaf.devices())).platform == "cpu" else np.asarray
    parts = [(shard.index, copy(shard.data)) for shard in _own(leaf)]
    return HostLeaf(keys, leaf.shape, leaf.dtype, chunk, parts)


def _own(leaf: jax.Array) -> list[Any]:
    return [shard for shard in leaf.addressable_shards if shard.replica_id == 0]


def _chunk_shape(shard: tuple[int, ...], itemsize: int, *, stacked: bool) -> list[int]:
    """Cuts a device's part evenly, into chunks of at most about `CHUNK_BYTES` and of one layer."""
    part = [1, *shard[1:]] if stacked and shard else list(shard)
    for axis in range(len(part)):
        while part[axis] % 2 == 0 and itemsize * math.prod(part) > CHUNK_BYTES:
            part[axis] //= 2
    return part


def _spec(folder: ObjectPath, keys: tuple[str | int, ...]) -> dict[str, Any]:
    return leaf_spec(folder / TREE_NAME, tuple(map(str, keys)))


def _keys(path: tuple[Any, ...]) -> tuple[str | int, ...]:
    """The path of a leaf: keys of dicts, names of fields, positions in tuples."""
    names = ("key", "name", "idx")
    return tuple(next(getattr(key, n) for n in names if hasattr(key, n)) for key in path)
