"""Reads and writes Orbax checkpoints with TensorStore: arrays are zarr3 in an OCDBT store.

Orbax itself imports JAX, which a publisher does not need, and writes a whole tree at once. This
module writes leaf by leaf, so that no model has to fit into memory. Orbax reads what it writes:

    CKPT/orbax.checkpoint          empty: this is a checkpoint
    CKPT/_CHECKPOINT_METADATA      JSON about it, which no reader needs
    CKPT/state/_METADATA           JSON: the keys of each leaf, and that it is to be a numpy array
    CKPT/state/...                 an OCDBT store with a zarr3 array for each leaf
"""

from __future__ import annotations

import itertools
import json
import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tensorstore as ts

from bridge.safetensors_io import listed
from bridge.tensors import DTYPES
from bridge.weight_map import Entry
from bridge.weight_map import Path as LeafPath
from runspec.core.canonical import MalformedJson
from runspec.core.errors import UserError
from runspec.core.files import Folder, ObjectPath, read_object, write_atomic

MAX_METADATA_BYTES = 64 * 1024 * 1024
AHEAD, AHEAD_BYTES = 4, 32 * 1024 * 1024
"""Pieces that are read ahead, and their bytes, at most."""
DEADLINE_S = 600.0
"""Seconds that one read may take: an object store may be silent."""
TREE_METADATA = "_METADATA"
TREE_NAME = "state"
"""The folder of the tree in a checkpoint that TensorStore alone wrote."""
_REMEDY = "point at a whole directory that Orbax wrote of the parameters alone"
CHUNK_BYTES = 8 * 1024 * 1024
_SEQUENCE_KEY, _DICT_KEY = 1, 2
"""Orbax's numbers for the keys of lists and of dicts."""


def open_leaves(
    orbax_dir: Folder, expected: Mapping[LeafPath, tuple[int, ...]], *, among_others: bool = False
) -> dict[LeafPath, ts.TensorStore]:
    """Open leaves of a checkpoint by path and shape; read their metadata, no data.

    Args:
        orbax_dir: directory that `orbax.checkpoint.v1.save` wrote.
        expected: shape of every leaf that is wanted.
        among_others: whether the checkpoint may hold other leaves too.

    Raises:
        UserError: not such a checkpoint, unreadable, or its leaves are not the expected ones.
    """
    tree = _tree_directory(orbax_dir)
    paths = set(leaf_paths(tree))
    missing = listed(".".join(path) for path in set(expected) - paths)
    unknown = listed(".".join(path) for path in paths - set(expected) if not among_others)
    if missing or unknown:
        raise UserError(
            f"leaves missing: {missing or 'none'}; leaves unexpected: {unknown or 'none'}",
            place=str(orbax_dir),
            remedy="use the config.json that belongs to this checkpoint",
        )
    return {path: _open_leaf(tree, path, shape) for path, shape in expected.items()}


@dataclass(frozen=True)
class Piece:
    """A part of a leaf that is read at once: a stored chunk, or the layers that share one."""

    entry: Entry
    index: tuple[slice, ...]
    """Slices of the leaf, layers first where it is stacked."""
    completes: bool
    """Whether it is the last of its layers (of the leaf, where it is not stacked)."""
    nbytes: int


def read_pieces(
    stores: Mapping[LeafPath, ts.TensorStore],
    entries: Sequence[Entry],
    *,
    place: Folder,
    ahead_bytes: int = AHEAD_BYTES,
) -> Iterator[tuple[Piece, np.ndarray]]:
    """Reads leaves piece by piece, each layer's pieces together, no stored chunk twice.

    While a piece is used the next are being read, into buffers that are used again: memory that is
    always new costs more than the reading. They have `ahead_bytes` together, or one piece.

    Args:
        stores: of `open_leaves`.
        entries: the leaves to read, in order.
        place: the checkpoint, for messages.
        ahead_bytes: how much is read ahead.

    Yields:
        A piece, and its numbers as they are stored, C-contiguous; good until the next is asked for.

    Raises:
        UserError: data missing or damaged.
    """
    pieces = [piece for entry in entries for piece in _pieces(stores[entry.path], entry)]
    largest = max(piece.nbytes for piece in pieces)
    count = min(AHEAD, max(1, ahead_bytes // largest))
    buffers = itertools.cycle([np.empty(largest, np.uint8) for _ in range(count)])
    pending: deque[tuple[Piece, np.ndarray, ts.WriteFutures]] = deque()

    def oldest() -> tuple[Piece, np.ndarray]:
        piece, data, read = pending.popleft()
        with _named(piece.entry.path, place):
            read.result(timeout=DEADLINE_S)
        return piece, data

    for piece in pieces:
        if len(pending) == count:
            yield oldest()
        source = stores[piece.entry.path][piece.index][ts.d[:].translate_to[0]]
        data = next(buffers)[: piece.nbytes].view(source.dtype.numpy_dtype).reshape(source.shape)
        pending.append((piece, data, ts.array(data, copy=False).write(source)))
    while pending:
        yield oldest()


def read_leaf(store: ts.TensorStore, path: LeafPath, *, place: Folder) -> np.ndarray:
    """Reads a whole leaf.

    Raises:
        UserError: data missing or damaged.
    """
    with _named(path, place):
        return store.read().result(timeout=DEADLINE_S)


def _pieces(store: ts.TensorStore, entry: Entry) -> Iterator[Piece]:
    shape = entry.leaf_shape
    stored = store.chunk_layout.read_chunk.shape or shape
    step = [part or size for part, size in zip(stored, shape, strict=True)]
    if entry.layers is not None and step[0] > 1:
        step[1:] = entry.shape
    starts = [range(0, size, part) for size, part in zip(shape, step, strict=True)]
    last = tuple(axis[-1] for axis in starts)
    inside = slice(0 if entry.layers is None else 1, None)
    for corner in itertools.product(*starts):
        index = tuple(
            slice(start, min(start + part, size))
            for start, part, size in zip(corner, step, shape, strict=True)
        )
        nbytes = (
            math.prod(part.stop - part.start for part in index) * store.dtype.numpy_dtype.itemsize
        )
        yield Piece(entry, index, corner[inside] == last[inside], nbytes)


@contextmanager
def _named(path: LeafPath, place: Folder) -> Iterator[None]:
    try:
        yield
    except (ValueError, TimeoutError) as error:  # TensorStore's, for all that is wrong with data
        raise UserError(
            f"leaf {'.'.join(path)} cannot be read: {error}",
            place=str(place),
            remedy="the checkpoint is partial or damaged: export another",
        ) from error


def _tree_directory(orbax_dir: Folder) -> Folder:
    """Orbax names the folder of the tree differently from version to version."""
    if isinstance(orbax_dir, ObjectPath):
        return orbax_dir / TREE_NAME
    found = sorted(metadata.parent for metadata in orbax_dir.glob(f"*/{TREE_METADATA}"))
    if len(found) != 1:
        raise UserError(
            f"not an Orbax checkpoint of one tree ({len(found)} trees found)",
            place=str(orbax_dir),
            remedy=_REMEDY,
        )
    return found[0].resolve()


def leaf_paths(tree: Folder) -> list[LeafPath]:
    """Reads the paths of all leaves of a tree from its metadata.

    Raises:
        UserError: as `open_leaves`.
    """
    metadata = tree / TREE_METADATA
    try:
        parsed = read_object(metadata, MAX_METADATA_BYTES)
        # An object store has no use for OCDBT, which packs small files into large ones.
        if not (parsed["use_zarr3"] and parsed["use_ocdbt"] == isinstance(tree, Path)):
            raise UserError("not zarr3 in OCDBT, Orbax's default format", place=str(metadata))
        return [
            tuple(str(key["key"]) for key in leaf["key_metadata"])
            for leaf in parsed["tree_metadata"].values()
        ]
    except (OSError, MalformedJson, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"cannot read the checkpoint's metadata: {error!r}",
            place=str(metadata),
            remedy=_REMEDY,
        ) from error


def leaf_spec(tree: Folder, path: LeafPath) -> dict[str, Any]:
    """TensorStore's spec of a leaf in the folder of a tree."""
    if isinstance(tree, ObjectPath):
        kvstore = (tree / ".".join(path)).kvstore()
    else:
        kvstore = {
            "driver": "ocdbt",
            "base": {"driver": "file", "path": f"{tree.resolve()}/"},
            "path": f"{'.'.join(path)}/",
        }
    return {
        "driver": "zarr3",
        "kvstore": kvstore,
        # Else a lost chunk would read as zeros, in silence.
        "fill_missing_data_reads": False,
        "store_data_equal_to_fill_value": True,
    }


def _open_leaf(tree: Folder, path: LeafPath, shape: tuple[int, ...]) -> ts.TensorStore:
    name = ".".join(path)
    try:
        store = ts.open(leaf_spec(tree, path), open=True, read=True).result(timeout=DEADLINE_S)
    except (ValueError, TimeoutError) as error:
        raise UserError(
            f"leaf {name} cannot be opened: {error}", place=str(tree), remedy=_REMEDY
        ) from error
    if store.shape != shape or store.dtype.numpy_dtype not in DTYPES.values():
        raise UserError(
            f"leaf {name} is {store.dtype.name}{list(store.shape)}, "
            f"the model needs {' or '.join(DTYPES)}{list(shape)}",
            place=str(tree),
            remedy="use the config.json that belongs to this checkpoint",
        )
    return store


def write_leaf(
    checkpoint: Path, entry: Entry, dtype: np.dtype, parts: Iterator[np.ndarray]
) -> None:
    """Writes one leaf, cut into chunks of at most `CHUNK_BYTES` (or a row) of one layer.

    In memory are the part that is being written and the next.

    Args:
        checkpoint: the directory.
        entry: the leaf.
        dtype: that its numbers are stored in.
        parts: its layers in order; the whole leaf, once, where it is not stacked.

    Raises:
        OSError, ValueError: it cannot be written; TensorStore reports a full disk as the latter.
    """
    store = ts.open(
        leaf_spec(checkpoint / TREE_NAME, entry.path),
        create=True,
        dtype=ts.dtype(dtype),
        shape=entry.leaf_shape,
        chunk_layout=ts.ChunkLayout(chunk_shape=_chunk_shape(entry, dtype.itemsize)),
    ).result()
    targets = [store] if entry.layers is None else [store[layer] for layer in range(entry.layers)]
    written = None
    for target, part in zip(targets, parts, strict=True):
        if written is not None:
            written.result()
        written = target.write(part)
    if written is not None:
        written.result()


def write_metadata(
    checkpoint: Folder, paths: Iterable[tuple[str | int, ...]], *, ocdbt: bool = True
) -> None:
    """Makes a checkpoint of the leaves that were written, which are all of its tree.

    Args:
        checkpoint: the folder, on a disk or in an object store.
        paths: of each leaf; numbers are positions in a list or a tuple.
        ocdbt: whether the arrays lie in an OCDBT store.
    """
    tree = {
        str(path): {
            "key_metadata": [
                {"key": str(key), "key_type": _SEQUENCE_KEY if isinstance(key, int) else _DICT_KEY}
                for key in path
            ],
            "value_metadata": {"value_type": "np.ndarray", "skip_deserialize": False},
        }
        for path in paths
    }
    metadata = {
        "tree_metadata": tree,
        "use_ocdbt": ocdbt,
        "use_zarr3": True,
        "store_array_data_equal_to_fill_value": True,
        "custom_metadata": None,
    }
    write_atomic(checkpoint / TREE_NAME / TREE_METADATA, json.dumps(metadata).encode())
    write_atomic(checkpoint / "_CHECKPOINT_METADATA", b"{}")
    write_atomic(checkpoint / "orbax.checkpoint", b"")


def _chunk_shape(entry: Entry, itemsize: int) -> list[int]:
    """Cut where the tensor's first dimension is, so that a chunk is a run of the tensor's bytes."""
    part = list(entry.shape)
    row = itemsize * math.prod(part) // part[entry.axes[0]]
    part[entry.axes[0]] = min(part[entry.axes[0]], max(1, CHUNK_BYTES // row))
    return part if entry.layers is None else [1, *part]
