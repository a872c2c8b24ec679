"""Hugging Face files onto the mesh."""

from __future__ import annotations

import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from learner_jax.leaves import leaf_at, load_params
from learner_jax.model import abstract_params
from learner_jax.sharding import make_mesh, param_shardings
from runspec.core.models.family import load_config
from runspec.core.spec import schema
from tests.bridge.leaves import iter_leaves
from tests.learner_jax.families import saved


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's counter of bytes")
@pytest.mark.parametrize("shape", [{}, {"data": 2, "fsdp": 2, "tensor": 2}], ids=["one", "eight"])
def test_every_byte_is_read_once_and_lies_where_the_table_says(shape: dict[str, int]) -> None:
    # given a model's files, and a mesh on which some arrays are cut and some copied
    directory = saved("qwen3, head_dim is not D / H")
    config = load_config(directory)
    mesh = make_mesh(schema.Mesh(**shape))
    shardings = param_shardings(abstract_params(config), mesh)  # imports the model's modules
    # when it is loaded
    before = bytes_read()
    params = load_params(directory, config, mesh)
    count = bytes_read() - before
    # then each array is that of the files, sharded by the table
    for path, leaf in iter_leaves(directory, config):
        array = leaf_at(params, path)
        np.testing.assert_array_equal(np.asarray(array), leaf)
        assert array.sharding == leaf_at(shardings, path)
    # and no more was read than the weights and the header
    size = (directory / "model.safetensors").stat().st_size
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    assert weights <= count <= size + 1000


def bytes_read() -> int:
    """Bytes that this process has asked the kernel for, ever."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(dict(line.split(": ") for line in lines)["rchar"])
