"""Between a tree of device arrays and the bridge's flat leaves, one leaf on the host at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from bridge.config import ModelConfig
from bridge.load import iter_leaves
from bridge.safetensors_io import SINGLE_NAME, write_safetensors
from bridge.tensors import dtype_named
from bridge.weight_map import hf_shapes, weight_map
from learner_jax.model import abstract_params
from learner_jax.sharding import param_shardings

LeafPath = tuple[str, ...]


def leaf_at(tree: Any, path: LeafPath) -> Any:
    """The leaf of a nested dict at a path of keys."""
    for key in path:
        tree = tree[key]
    return tree


def load_params(model_dir: Path, config: ModelConfig, mesh: Mesh) -> dict[str, Any]:
    """Reads a Hugging Face directory onto the mesh, in the stored dtype, leaf by leaf.

    Raises:
        UserError: the files are unreadable or are not this model's.
    """
    shardings = param_shardings(abstract_params(config), mesh)
    tree: dict[str, Any] = {}
    for path, leaf in iter_leaves(model_dir, config):
        node = tree
        for key in path[:-1]:
            node = node.setdefault(key, {})
        node[path[-1]] = jax.device_put(leaf, leaf_at(shardings, path))
    return tree


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
        return np.asarray(self._leaves[path])

    def __iter__(self) -> Iterator[LeafPath]:
        return iter(self._leaves)

    def __len__(self) -> int:
        return len(self._leaves)
