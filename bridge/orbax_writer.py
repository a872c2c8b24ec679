"""Orbax checkpoints written without Orbax, leaf by leaf, so that no model need fit into memory.

Orbax itself takes a whole tree at once, and imports JAX. What it reads is this:

    CKPT/orbax.checkpoint          empty: this is a checkpoint
    CKPT/_CHECKPOINT_METADATA      JSON about it, none of which is needed
    CKPT/state/_METADATA           JSON: the keys of each leaf, and that it is to be a numpy array
    CKPT/state/...                 an OCDBT store with a zarr3 array for each leaf
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import tensorstore as ts

from bridge.orbax_io import TREE_METADATA, TREE_NAME, leaf_spec
from bridge.weight_map import Entry
from runspec.core.files import write_atomic
from runspec.core.object_store import Folder

CHUNK_BYTES = 8 * 1024 * 1024
_SEQUENCE_KEY, _DICT_KEY = 1, 2
"""Orbax's numbers for the keys of lists and of dicts."""


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
    said = {
        "tree_metadata": tree,
        "use_ocdbt": ocdbt,
        "use_zarr3": True,
        "store_array_data_equal_to_fill_value": True,
        "custom_metadata": None,
    }
    write_atomic(checkpoint / TREE_NAME / TREE_METADATA, json.dumps(said).encode())
    write_atomic(checkpoint / "_CHECKPOINT_METADATA", b"{}")
    write_atomic(checkpoint / "orbax.checkpoint", b"")


def _chunk_shape(entry: Entry, itemsize: int) -> list[int]:
    """Cut where the tensor's first dimension is, so that a chunk is a run of the tensor's bytes."""
    part = list(entry.shape)
    row = itemsize * math.prod(part) // part[entry.axes[0]]
    part[entry.axes[0]] = min(part[entry.axes[0]], max(1, CHUNK_BYTES // row))
    return part if entry.layers is None else [1, *part]
