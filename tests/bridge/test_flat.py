"""The vector of a model's weights: its tensors in the weight map's order, and back."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from bridge.flat import FlatLayout
from bridge.load import LeafReader
from bridge.safetensors_io import read_headers, read_tensor
from bridge.weight_map import hf_shapes
from runspec.core.models.family import load_config
from tests.bridge.leaves import iter_leaves

from .conftest import FAMILIES, MakeModel


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("family", FAMILIES)
def test_it_is_the_hugging_face_tensors_one_after_the_other_and_back(
    make_model: MakeModel, family: str, tied: bool
) -> None:
    # given a model that transformers wrote
    directory: Path = make_model(tied=tied, dtype="float32", family=family)
    config = load_config(directory)
    layout, leaves = FlatLayout(config), dict(iter_leaves(directory, config))
    # when flattened
    flat = layout.flatten(leaves)
    # then it is its tensors, in the map's order
    headers = read_headers(directory)
    tensors = [read_tensor(headers[name]).reshape(-1) for name, _ in hf_shapes(config)]
    assert flat.dtype == np.float32 and flat.shape == (layout.size,)
    np.testing.assert_array_equal(flat, np.concatenate(tensors))
    # and the leaves come back
    back = dict(layout.leaves(flat))
    assert list(back) == list(LeafReader(directory, config).entries)
    for path, leaf in leaves.items():
        np.testing.assert_array_equal(back[path], leaf)
        assert back[path].shape == leaf.shape


def test_the_type_may_be_another(make_model: MakeModel) -> None:
    directory = make_model(tied=True, dtype="bfloat16")
    config = load_config(directory)
    layout, leaves = FlatLayout(config), dict(iter_leaves(directory, config))
    assert layout.flatten(leaves, np.float64).dtype == np.float64
    np.testing.assert_array_equal(layout.flatten(leaves, np.float64), layout.flatten(leaves))
