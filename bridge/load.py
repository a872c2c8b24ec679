"""Hugging Face safetensors -> leaves of the JAX tree, one at a time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from bridge.config import ModelConfig
from bridge.safetensors_io import TensorInfo, listed, read_headers, read_tensor
from bridge.weight_map import Entry, hf_shapes, weight_map
from bridge.weight_map import Path as LeafPath
from runspec.common.errors import UserError


def iter_leaves(hf_dir: Path, config: ModelConfig) -> Iterator[tuple[LeafPath, np.ndarray]]:
    """Reads a model leaf by leaf; at most one leaf and one tensor are in memory.

    Args:
        hf_dir: a Hugging Face directory, one safetensors file or several with an index.
        config: its shape (`bridge.config.load_config`).

    Yields:
        The leaf's path, such as ("layers", "q"), and its array in the stored dtype (float32 or
        `ml_dtypes.bfloat16`), stacked [L, ...] below "layers". All leaves, in the map's order.

    Raises:
        UserError: unreadable files; tensors missing, not expected or of another shape, by name.
    """
    tensors = checked_headers(hf_dir, config)
    for entry in weight_map(config):
        yield entry.path, _read_leaf(entry, tensors)


def checked_headers(hf_dir: Path, config: ModelConfig) -> dict[str, TensorInfo]:
    """The headers of a model, exactly the tensors that its config asks for.

    Raises:
        UserError: as `iter_leaves`.
    """
    tensors = read_headers(hf_dir)
    expected = dict(hf_shapes(config))
    remedy = "use the config.json that belongs to these weights"
    if missing := expected.keys() - tensors.keys():
        raise UserError(f"tensors missing: {listed(missing)}", place=str(hf_dir), remedy=remedy)
    if unknown := tensors.keys() - expected.keys():
        raise UserError(f"tensors unexpected: {listed(unknown)}", place=str(hf_dir), remedy=remedy)
    for name, shape in expected.items():
        if tensors[name].shape != shape:
            raise UserError(
                f"tensor {name} has shape {tensors[name].shape}, the config says {shape}",
                place=str(hf_dir),
                remedy=remedy,
            )
    return tensors


def _read_leaf(entry: Entry, tensors: dict[str, TensorInfo]) -> np.ndarray:
    infos = [tensors[name] for name in entry.tensor_names()]
    if entry.layers is None:
        return np.ascontiguousarray(entry.to_tree(read_tensor(infos[0])))
    if len({info.dtype for info in infos}) != 1:
        raise UserError(
            f"layers of {entry.hf_name} differ in dtype", place=str(infos[0].file.parent)
        )
    leaf = np.empty(entry.leaf_shape, infos[0].dtype)
    for layer, info in enumerate(infos):
        leaf[layer] = entry.to_tree(read_tensor(info))
    return leaf
