"""Between a tree of device arrays and the bridge's flat leaves, at most one leaf on the host."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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
from bridge.weight_map import hf_shapes, weight_map
from learner_jax.model import abstract_params
from learner_jax.sharding import param_shardings
from runspec.core.models.config import ModelConfig

LeafPath = tuple[str, ...]


def leaf_at(tree: Any, path: LeafPath) -> Any:
    """The leaf of a nested dict at a path of keys."""
    for key in path:
        tree = tree[key]
    return tree


def load_params(model_dir: Path, config: ModelConfig, mesh: Mesh) -> dict[str, Any]:
    """Reads a Hugging Face directory onto the mesh, in the stored dtype.

    Each process reads what its own devices hold, one device's part of one leaf at a time: that is
    the most that lies in the host's memory.

    Raises:
        UserError: the files are unreadable or are not this model's.
    """
    reader = LeafReader(model_dir, config)
    shardings = param_shardings(abstract_params(config), mesh)
    tree: dict[str, Any] = {}
    for path, entry in reader.entries.items():
        node = tree
        for key in path[:-1]:
            node = node.setdefault(key, {})
        node[path[-1]] = _load_leaf(reader, path, entry.leaf_shape, leaf_at(shardings, path))
    return tree


def _load_leaf(
    reader: LeafReader, path: LeafPath, shape: tuple[int, ...], sharding: NamedSharding
) -> Array:
    parts: dict[tuple, Array] = {}
    arrays = []
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        assert index is not None, "a device of this process has a part"
        bounds = tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))
        # A part that several devices hold is read once, and copied from the first.
        source = parts.get(bounds)
        array = jax.device_put(reader.read(path, index) if source is None else source, device)
        parts.setdefault(bounds, array.block_until_ready())
        arrays.append(array)
    return jax.make_array_from_single_device_arrays(shape, sharding, arrays)


def save_weights(params: Any, config: ModelConfig, directory: Path) -> None:
    """Writes model.safetensors, float32, of a tree of float32 arrays."""

    def tensors() -> Iterator[np.ndarray]:
        for entry in weight_map(config):
            leaf = np.asarray(leaf_at(params, entry.path))
            for part in [leaf] if entry.layers is None else leaf:
                yield entry.to_hf(part)

    shapes = dict(hf_shapes(config))
    write_safetensors(directory / SINGLE_NAME, shapes, dtype_named("float32"), tensors())


class HostLeaves(Mapping[LeafPath, np.ndarray]):
    """A tree of device arrays as flat host arrays, each fetched when it is asked for."""

    def __init__(self, tree: Any) -> None:
        flat = jax.tree_util.tree_leaves_with_path(tree)
        self._leaves = {tuple(key.key for key in path): leaf for path, leaf in flat}

    def __getitem__(self, path: LeafPath) -> np.ndarray:
        leaf = self._leaves[path]
        if not leaf.is_fully_addressable:  # then every process asks for it
            leaf = multihost_utils.process_allgather(leaf, tiled=True)
        return np.asarray(leaf)

    def __iter__(self) -> Iterator[LeafPath]:
        return iter(self._leaves)

    def __len__(self) -> int:
        return len(self._leaves)
