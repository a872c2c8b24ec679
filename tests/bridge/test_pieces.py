"""Reading ahead changes neither what is read nor its order."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tensorstore as ts

from bridge.orbax_io import leaf_spec, read_pieces
from bridge.weight_map import Entry, entry
from runspec.core.models.family import Row

SIZES = {"L": 3, "D": 7, "F": 5}
ENTRIES = [
    entry(Row("layers.up", "up.{i}", "L D F", "F D"), SIZES),
    entry(Row("norm", "norm", "D", "D"), SIZES),
    entry(Row("layers.down", "down.{i}", "L F D", "D F"), SIZES),
]


def stored(folder: Path, leaf: Entry, chunk: list[int]) -> tuple[ts.TensorStore, np.ndarray]:
    """A leaf of different numbers, cut into chunks of a shape."""
    shape = leaf.leaf_shape
    numbers = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    layout = ts.ChunkLayout(chunk_shape=chunk[-len(shape) :])
    spec = leaf_spec(folder, leaf.path)
    store = ts.open(spec, create=True, dtype=ts.float32, shape=shape, chunk_layout=layout).result()
    store.write(numbers).result()
    return store, numbers


@pytest.mark.parametrize("ahead_bytes", [0, 300, 10**6])
@pytest.mark.parametrize("chunk", [[1, 2, 3], [1, 7, 7], [2, 2, 3], [3, 7, 7]], ids=str)
def test_every_number_comes_once_and_layers_one_after_another(
    tmp_path: Path, chunk: list[int], ahead_bytes: int
) -> None:
    # given leaves that are cut somehow
    made = {leaf.path: stored(tmp_path, leaf, chunk) for leaf in ENTRIES}
    stores = {path: store for path, (store, _) in made.items()}
    found = {leaf.path: np.full(leaf.leaf_shape, np.nan, np.float32) for leaf in ENTRIES}
    # when they are read, a little ahead or much
    order, whole = [], []
    for piece, data in read_pieces(stores, ENTRIES, place=tmp_path, ahead_bytes=ahead_bytes):
        assert piece.nbytes == data.nbytes
        target = found[piece.entry.path][piece.index]
        assert np.isnan(target).all()
        target[...] = data
        layers = range(3)[piece.index[0]] if piece.entry.layers else range(1)
        order += [(ENTRIES.index(piece.entry), layer) for layer in layers]
        # then a layer is whole when its last piece has come, and not before
        leaf = found[piece.entry.path]
        now = leaf[list(layers)] if piece.entry.layers else leaf
        assert piece.completes == (not np.isnan(now).any())
        whole += [(ENTRIES.index(piece.entry), layer) for layer in layers if piece.completes]
    # and all comes in order, each number once
    assert order == sorted(order)
    assert whole == [(0, 0), (0, 1), (0, 2), (1, 0), (2, 0), (2, 1), (2, 2)]
    for path, (_, numbers) in made.items():
        np.testing.assert_array_equal(found[path], numbers)
