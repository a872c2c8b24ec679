"""A model's weights as one vector: its Hugging Face tensors in the weight map's order.

Islands with different meshes average such vectors; `bridge.codecs` encodes them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import numpy as np

from bridge.weight_map import Entry, Path, weight_map
from runspec.core.models.config import ModelConfig


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
