"""Trees of arrays in an object store: zarr3 in Orbax's layout, by TensorStore's own drivers.

Orbax 0.12 writes to disks and to gs:// only. What is written here Orbax reads, once it is copied to
a disk. An object is one chunk with its checksum (crc32c), which TensorStore compares whenever it
reads. A chunk lies inside the part of one device, so no two processes write to one object.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import tensorstore as ts

from bridge.orbax_io import CHUNK_BYTES, TREE_NAME, leaf_paths, leaf_spec, write_metadata
from learner_jax.saver import DEADLINE_S
from runspec.core.errors import UserError
from runspec.core.files import ObjectPath

_CODECS = [
    {"name": "bytes", "configuration": {"endian": "little"}},
    {"name": "crc32c"},
]
_DONE = "done"
"""Folder of a checkpoint in which each process but the first says that it has written its part."""
_POLL_S = 0.1


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
