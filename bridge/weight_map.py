"""The weight map: which leaf of the JAX tree is which Hugging Face tensor. Read both ways.

It follows from the table of the model's family (`runspec.core.models.family.Row`). No family fixes
a tensor's dtype: it is that of the checkpoint, or of the version that is exported.

The tensors are cut into safetensors files, in order. Imports no numpy: what a version will weigh is
known from its shapes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from runspec.core.models import ModelConfig
from runspec.core.models.family import Row, family
from runspec.core.models.parameters import axis_sizes

Shapes = Mapping[str, tuple[int, ...]]
"""Shapes of tensors by name, in the order of the file."""

MAX_SHARD_BYTES = 5 * 10**9


if TYPE_CHECKING:  # it is only named: who wants shapes alone needs no numpy
    import numpy as np

Path = tuple[str, ...]


@dataclass(frozen=True)
class Entry:
    """A row with the sizes of one model: a leaf of its tree and the tensors that it is made of."""

    path: Path
    """Keys of the nested dict, such as ("layers", "attention", "q", "weight")."""
    hf_name: str
    """Hugging Face name; `{i}` where there is one tensor a layer."""
    shape: tuple[int, ...]
    """Shape in the tree, of one layer where stacked."""
    hf_shape: tuple[int, ...]
    axes: tuple[int, ...]
    """The dimensions of `shape` in the order in which the tensor's bytes run over them."""
    layers: int | None
    """L where the leaf is stacked on axis 0, else None."""

    @property
    def leaf_shape(self) -> tuple[int, ...]:
        return self.shape if self.layers is None else (self.layers, *self.shape)

    def tensor_names(self) -> list[str]:
        """The Hugging Face names, in the order of axis 0 where stacked."""
        if self.layers is None:
            return [self.hf_name]
        return [self.hf_name.format(i=layer) for layer in range(self.layers)]

    def inverse_axes(self) -> tuple[int, ...]:
        """The order that undoes `axes`."""
        return tuple(sorted(range(len(self.axes)), key=self.axes.__getitem__))

    def to_hf(self, part: np.ndarray) -> np.ndarray:
        """One layer of the leaf as its tensor: a view where numpy can make one, else a copy."""
        return part.transpose(self.axes).reshape(self.hf_shape)

    def to_tree(self, tensor: np.ndarray) -> np.ndarray:
        """A tensor as one layer of the leaf: the inverse of `to_hf`."""
        split = [self.shape[axis] for axis in self.axes]
        return tensor.reshape(split).transpose(self.inverse_axes())


def weight_map(config: ModelConfig) -> list[Entry]:
    """The map of a model: every leaf once, in the order of its family's table."""
    sizes = axis_sizes(config)
    return [entry(row, sizes) for row in family(config.model_type).rows(config)]


def entry(row: Row, sizes: Mapping[str, int]) -> Entry:
    """A row with the sizes of its axes."""
    tree, groups = row.tree.split(), row.tensor_axes()
    stacked = tree[0] == "L"
    part = tree[1:] if stacked else tree
    return Entry(
        path=row.path,
        hf_name=row.hf_name,
        shape=tuple(sizes[axis] for axis in part),
        hf_shape=tuple(math.prod(sizes[axis] for axis in group.split()) for group in groups),
        axes=tuple(part.index(axis) for group in groups for axis in group.split()),
        layers=sizes["L"] if stacked else None,
    )


def hf_shapes(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of every Hugging Face tensor of a model, in the map's order."""
    for leaf in weight_map(config):
        for name in leaf.tensor_names():
            yield name, leaf.hf_shape


def tied_tensors(config: ModelConfig) -> dict[str, str]:
    """Names of the tensors that a tied model does without, and of those that stand for them."""
    if not config.tie_word_embeddings:
        return {}
    table = family(config.model_type).table
    names = {row.leaf: row.hf_name for row in table}
    return {row.hf_name: names[row.tied] for row in table if row.tied}


def plan_shards(
    shapes: Shapes, itemsize: int, max_bytes: int = MAX_SHARD_BYTES
) -> list[dict[str, tuple[int, ...]]]:
    """Cuts the tensors, in order, into files of at most `max_bytes` (or of one tensor)."""
    shards: list[dict[str, tuple[int, ...]]] = [{}]
    size = 0
    for name, shape in shapes.items():
        nbytes = math.prod(shape) * itemsize
        if shards[-1] and size + nbytes > max_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = shape
        size += nbytes
    return shards


def file_header(shapes: Shapes, code: str, itemsize: int) -> bytes:
    """Return the start of a safetensors file: the header's length, and the header.

    Args:
        shapes: name and shape of every tensor, in the order in which they will come.
        code: their type as the format writes it, `F32` or `BF16`.
        itemsize: bytes of a number.
    """
    # transformers refuses a file without this note of the framework that wrote it.
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in shapes.items():
        end = offset + math.prod(shape) * itemsize
        header[name] = {"dtype": code, "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that the tensors start aligned
    return len(text).to_bytes(8, "little") + text
