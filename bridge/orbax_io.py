"""Orbax checkpoints without Orbax: their arrays are zarr3 in an OCDBT store, read by TensorStore.

Orbax itself imports JAX; a publisher has no use for that.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import numpy as np
import tensorstore as ts

from bridge.config import ModelConfig
from bridge.safetensors_io import listed
from bridge.tensors import DTYPES
from bridge.weight_map import Entry, weight_map
from bridge.weight_map import Path as LeafPath
from runspec.common.canonical import MalformedJson, parse_object
from runspec.common.errors import UserError
from runspec.common.files import read_bounded

MAX_METADATA_BYTES = 64 * 1024 * 1024
_TREE_METADATA = "_METADATA"
_REMEDY = "point at a whole directory that Orbax wrote of the parameters alone"


def open_checkpoint(orbax_dir: Path, config: ModelConfig) -> dict[LeafPath, ts.TensorStore]:
    """Opens every leaf of a checkpoint of parameters; reads shapes and dtypes, no data.

    Args:
        orbax_dir: what `orbax.checkpoint.v1.save` wrote.
        config: of the model that it must hold.

    Raises:
        UserError: not such a checkpoint, unreadable, or its leaves are not the model's.
    """
    return open_leaves(orbax_dir, {entry.path: entry.leaf_shape for entry in weight_map(config)})


def open_leaves(
    orbax_dir: Path, expected: Mapping[LeafPath, tuple[int, ...]], *, among_others: bool = False
) -> dict[LeafPath, ts.TensorStore]:
    """Opens leaves of a checkpoint by path and shape; reads no data.

    Args:
        orbax_dir: what `orbax.checkpoint.v1.save` wrote.
        expected: shape of every leaf that is wanted.
        among_others: whether the checkpoint may hold more than those.

    Raises:
        UserError: as `open_checkpoint`.
    """
    tree = _tree_directory(orbax_dir)
    paths = set(_leaf_paths(tree / _TREE_METADATA))
    missing = listed(".".join(path) for path in set(expected) - paths)
    unknown = listed(".".join(path) for path in paths - set(expected) if not among_others)
    if missing or unknown:
        raise UserError(
            f"leaves missing: {missing or 'none'}; leaves unexpected: {unknown or 'none'}",
            place=str(orbax_dir),
            remedy="use the config.json that belongs to this checkpoint",
        )
    return {path: _open_leaf(tree, path, shape) for path, shape in expected.items()}


def read_parts(store: ts.TensorStore, entry: Entry, *, place: Path) -> Iterator[np.ndarray]:
    """Reads a leaf layer by layer (whole where it is not stacked).

    Layers that share a stored chunk are read together, so no chunk is decompressed twice and at
    most one chunk's layers are in memory.

    Raises:
        UserError: data missing or damaged.
    """
    try:
        if entry.layers is None:
            yield store.read().result()
            return
        chunk_shape = store.chunk_layout.read_chunk.shape or ()
        step = (chunk_shape[0] if chunk_shape else None) or 1
        for start in range(0, entry.layers, step):
            yield from store[start : min(start + step, entry.layers)].read().result()
    except ValueError as error:  # what TensorStore raises for all that is wrong with the data
        raise UserError(
            f"leaf {'.'.join(entry.path)} cannot be read: {error}",
            place=str(place),
            remedy="the checkpoint is partial or damaged: export another",
        ) from error


def write_checkpoint(orbax_dir: Path, leaves: Iterable[tuple[LeafPath, np.ndarray]]) -> None:
    """Saves leaves as an Orbax checkpoint, which appears whole. Imports Orbax, and so JAX.

    Raises:
        UserError: `orbax_dir` exists, or cannot be written.
    """
    from orbax.checkpoint import v1 as ocp

    if orbax_dir.exists():
        raise UserError("exists already", place=str(orbax_dir), remedy="name a new directory")
    tree: dict = {}
    for path, leaf in leaves:
        node = tree
        for key in path[:-1]:
            node = node.setdefault(key, {})
        node[path[-1]] = leaf
    try:
        ocp.save(orbax_dir.resolve(), tree)
    except (OSError, ValueError) as error:
        raise UserError(f"cannot write the checkpoint: {error}", place=str(orbax_dir)) from error


def _tree_directory(orbax_dir: Path) -> Path:
    """Orbax names the folder of the tree differently from version to version."""
    found = sorted(metadata.parent for metadata in orbax_dir.glob(f"*/{_TREE_METADATA}"))
    if len(found) != 1:
        raise UserError(
            f"not an Orbax checkpoint of one tree ({len(found)} trees found)",
            place=str(orbax_dir),
            remedy=_REMEDY,
        )
    return found[0].resolve()


def _leaf_paths(metadata: Path) -> list[LeafPath]:
    try:
        parsed = parse_object(
            read_bounded(metadata, MAX_METADATA_BYTES), max_bytes=MAX_METADATA_BYTES
        )
        if not (parsed["use_ocdbt"] and parsed["use_zarr3"]):
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


def _open_leaf(tree: Path, path: LeafPath, shape: tuple[int, ...]) -> ts.TensorStore:
    name = ".".join(path)
    spec = {
        "driver": "zarr3",
        "kvstore": {"driver": "ocdbt", "base": f"file://{tree}/", "path": f"{name}/"},
        "fill_missing_data_reads": False,  # else a lost chunk would read as zeros, in silence
    }
    try:
        store = ts.open(spec, open=True, read=True).result()
    except ValueError as error:
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
