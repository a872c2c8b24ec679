"""Tensors: dtypes, digests, copies between memory orders, and all of a model as one vector.

The vector has the Hugging Face tensors in the weight map's order. Islands with different meshes
average such vectors; `bridge.codecs` encodes them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any

import ml_dtypes
import numpy as np

from bridge.weight_map import Entry, Path, weight_map
from runspec.core.canonical import canonical_json, digest_bytes
from runspec.core.errors import UserError
from runspec.core.models.config import ModelConfig

DTYPES: dict[str, np.dtype] = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}
"""The types that versions and checkpoints have, by the name that spec and config.json use."""
_COLUMNS = 256
_ROWS = 256
_PADDING = 8


def dtype_named(name: str) -> np.dtype:
    """The numpy dtype of a name of `DTYPES`; another name is a UserError."""
    try:
        return DTYPES[name]
    except KeyError:
        raise UserError(
            f"dtype {name!r} is not supported", remedy=f"use one of {', '.join(DTYPES)}"
        ) from None


def tensor_bytes(array: np.ndarray) -> memoryview:
    """The little-endian C-order bytes of an array, without a copy where it lies so already."""
    array = contiguous(array)
    if array.dtype.byteorder == ">":
        array = array.astype(array.dtype.newbyteorder("<"))
    return array.reshape(-1).view(np.uint8).data


def tensor_digest(array: np.ndarray) -> str:
    """BLAKE3 of the tensor's little-endian C-order bytes (shape and dtype are not part of it)."""
    return digest_bytes(tensor_bytes(array))


def record(dtype: np.dtype, shape: tuple[int, ...], digest: str) -> dict[str, Any]:
    """The record of a tensor whose bytes were hashed."""
    return {"dtype": dtype.name, "shape": list(shape), "blake3": digest}


def model_digest(tensors: Mapping[str, Mapping[str, Any]]) -> str:
    """One digest of a whole model: BLAKE3 of the canonical JSON of its tensor records by name."""
    return digest_bytes(canonical_json(dict(tensors)))


def tree_digests(
    flat: Mapping[Path, np.ndarray], config: ModelConfig, dtype: str
) -> dict[str, str]:
    """Digests of a JAX tree's weights as they would be published.

    Args:
        flat: every leaf of the tree by its path, as host arrays.
        config: the model's shape.
        dtype: name of the published type; leaves are cast to it (round to nearest even).

    Returns:
        For each Hugging Face name the digest that a manifest of these weights carries.
    """
    target = dtype_named(dtype)
    digests = {}
    for entry in weight_map(config):
        leaf = flat[entry.path]
        parts = [leaf] if entry.layers is None else list(leaf)
        for name, part in zip(entry.tensor_names(), parts, strict=True):
            digests[name] = tensor_digest(entry.to_hf(part.astype(target, copy=False)))
    return digests


def copy_into(target: np.ndarray, source: np.ndarray) -> None:
    """target[...] = source, for arrays of one shape and dtype.

    Where one is transposed, numpy alone goes through one of them in steps of whole rows, which fall
    on few lines of the cache. Blocks that go by way of a small buffer, its rows padded, are copied
    three to ten times as fast.
    """
    down, across = _fastest(target), _fastest(source)
    if down == across:
        target[...] = source
        return
    bits = f"u{source.itemsize}"  # bfloat16 itself numpy copies by a call for each number
    target, source = (
        np.moveaxis(array.view(bits), (down, across), (-2, -1)) for array in (target, source)
    )
    rows, columns = source.shape[-2:]
    buffer = np.empty((min(rows, _ROWS), _COLUMNS + _PADDING), source.dtype)
    blocks = [
        (slice(r, r + _ROWS), slice(c, c + _COLUMNS))
        for r in range(0, rows, _ROWS)
        for c in range(0, columns, _COLUMNS)
    ]
    for outer, block in itertools.product(np.ndindex(source.shape[:-2]), blocks):
        part = source[outer][block]
        staged = buffer[: part.shape[0], : part.shape[1]]
        staged[...] = part
        target[outer][block] = staged


def contiguous(array: np.ndarray) -> np.ndarray:
    """The array in C order, itself where it lies so already."""
    if array.flags.c_contiguous:
        return array
    out = np.empty(array.shape, array.dtype)
    copy_into(out, array)
    return out


def _fastest(array: np.ndarray) -> int:
    """The dimension along which neighbours lie nearest; -1 where no dimension has two elements."""
    steps = [
        (abs(s), axis)
        for axis, (n, s) in enumerate(zip(array.shape, array.strides, strict=True))
        if n > 1
    ]
    return min(steps)[1] if steps else -1


class FlatLayout:
    """Where each weight of a model lies in the vector.

    Each tensor lies in C order, one after the other, without gaps.
    """

    size: int
    """n: elements of the vector."""

    def __init__(self, config: ModelConfig) -> None:
        self._parts: list[tuple[Entry, slice]] = []
        self.size = 0
        for entry in weight_map(config):
            end = self.size + math.prod(entry.leaf_shape)
            self._parts.append((entry, slice(self.size, end)))
            self.size = end

    def flatten(
        self, leaves: Mapping[Path, np.ndarray], dtype: np.dtype | type = np.float32
    ) -> np.ndarray:
        """Return the leaves of a tree as one vector.

        Args:
            leaves: every leaf by its path; each is asked for once, in the order of the vector.
            dtype: of the result.

        Returns:
            A new array [n].
        """
        flat = np.empty(self.size, dtype)
        for entry, where in self._parts:
            for target, part in zip(
                self._tensors(entry, flat[where]), _layers(entry, leaves[entry.path]), strict=True
            ):
                target[...] = entry.to_hf(part)
        return flat

    def leaves(self, flat: np.ndarray) -> Iterator[tuple[Path, np.ndarray]]:
        """Yield path and array of each leaf of a vector [n].

        The arrays have the shapes of the JAX tree. They are views where one tensor is the leaf,
        and copies where a leaf has one tensor a layer.
        """
        for entry, where in self._parts:
            parts = [entry.to_tree(tensor) for tensor in self._tensors(entry, flat[where])]
            yield entry.path, parts[0] if entry.layers is None else np.stack(parts)

    @staticmethod
    def _tensors(entry: Entry, flat: np.ndarray) -> np.ndarray:
        """Views of the tensors of a leaf, one for each row of the result."""
        return flat.reshape(entry.layers or 1, *entry.hf_shape)


def _layers(entry: Entry, leaf: np.ndarray) -> np.ndarray:
    """One row for each tensor of a leaf."""
    return leaf[None] if entry.layers is None else leaf
