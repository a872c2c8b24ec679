"""Slices of leaves: the right numbers, and no byte more than they take."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bridge.load import LeafReader
from bridge.safetensors_io import TensorInfo, read_header, read_slice, write_safetensors
from bridge.weight_map import hf_shapes, weight_map
from runspec.core.errors import UserError
from runspec.core.models.family import load_config, parse_config
from tests.bridge.leaves import iter_leaves

from .conftest import MakeModel

SPREAD = 300
"""What reading the counter itself may add to it, in bytes."""
FIELDS = {
    "model_type": "qwen3",
    "vocab_size": 64,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "attention_bias": True,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
}


def bytes_read() -> int:
    """Bytes that this process has asked the kernel for, ever."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(dict(line.split(": ") for line in lines)["rchar"])


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Large enough that a part of it is told from the whole by its bytes."""
    directory = tmp_path_factory.mktemp("model")
    shapes = dict(hf_shapes(parse_config(FIELDS, place="config.json")))
    rng = np.random.default_rng(0)
    write_safetensors(
        directory / "model.safetensors",
        shapes,
        np.dtype(np.float32),
        (rng.normal(size=shape).astype(np.float32) for shape in shapes.values()),
    )
    (directory / "config.json").write_text(json.dumps(FIELDS))
    return directory


def halves(shape: tuple[int, ...]) -> list[tuple[slice, ...]]:
    """For each dimension the second half of it, all of the others."""
    cuts = []
    for axis, size in enumerate(shape):
        index = [slice(None)] * len(shape)
        index[axis] = slice(size // 2, size)
        cuts.append(tuple(index))
    return cuts


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's counter of bytes")
def test_a_part_of_a_leaf_takes_its_own_bytes_only(model_dir: Path) -> None:
    # given a model, and the whole of each leaf
    config = load_config(model_dir)
    reader, whole = LeafReader(model_dir, config), dict(iter_leaves(model_dir, config))
    for entry in weight_map(config):
        for index in halves(entry.leaf_shape):
            # when half of a leaf is read, along each of its dimensions
            before = bytes_read()
            part = reader.read(entry.path, index)
            count = bytes_read() - before
            # then it is that half, and so much was read
            np.testing.assert_array_equal(part, whole[entry.path][index])
            assert part.flags.c_contiguous
            assert part.nbytes <= count <= part.nbytes + SPREAD, (entry.path, index)


@settings(deadline=None, max_examples=50)
@given(data=st.data())
def test_a_slice_is_that_of_the_array(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    # given a file with an array of any shape in the middle of it
    shape = tuple(data.draw(st.lists(st.integers(0, 5), max_size=4)))
    array = np.arange(math.prod(shape), dtype=np.float32).reshape(shape)
    path = tmp_path_factory.mktemp("slice") / "x"
    path.write_bytes(b"before" + array.tobytes() + b"after")
    # when any part of it is read
    index = tuple(
        slice(*sorted((data.draw(st.integers(0, n)), data.draw(st.integers(0, n))))) for n in shape
    )
    found = read_slice(TensorInfo("x", path, array.dtype, shape, len(b"before")), index)
    # then it is numpy's
    np.testing.assert_array_equal(found, array[index])


def test_a_file_that_shrinks_while_it_is_read_is_an_error_that_names_the_tensor(
    make_model: MakeModel,
) -> None:
    # given a model whose headers were read whole
    hf_dir = make_model(tied=False, dtype="float32")
    reader = LeafReader(hf_dir, load_config(hf_dir))
    path = hf_dir / "model.safetensors"
    info = read_header(path)["model.layers.1.mlp.up_proj.weight"]
    # when its file is cut off inside a tensor, or goes
    with path.open("r+b") as file:
        file.truncate(info.offset + 7)
    # then reading says which tensor
    with pytest.raises(UserError, match=r"model\.layers\.1\.mlp\.up_proj\.weight: the file became"):
        reader.read(("layers", "mlp", "up", "weight"))
    path.unlink()
    with pytest.raises(UserError, match=r"up_proj\.weight: cannot read: No such file"):
        reader.read(("layers", "mlp", "up", "weight"))


def with_tensors(hf_dir: Path, extra: dict[str, np.ndarray]) -> None:
    """Adds a second file with more tensors, and the index of both."""
    second = hf_dir / "more.safetensors"
    dtype = next(iter(extra.values())).dtype
    write_safetensors(second, {k: v.shape for k, v in extra.items()}, dtype, extra.values())
    (hf_dir / "model.safetensors").rename(hf_dir / "first.safetensors")
    listing = {
        name: file.name for file in hf_dir.glob("*.safetensors") for name in read_header(file)
    }
    (hf_dir / "model.safetensors.index.json").write_text(json.dumps({"weight_map": listing}))


def test_a_tied_model_may_be_stored_with_its_head_if_it_is_the_embedding(
    make_model: MakeModel,
) -> None:
    # given a tied model whose files hold the head too, and constants that old checkpoints hold
    hf_dir = make_model(tied=True, dtype="float32")
    config = load_config(hf_dir)
    before = dict(iter_leaves(hf_dir, config))
    head = before[("embed",)].copy()
    inv_freq = np.ones(2, np.float32)
    names = {"lm_head.weight": head, "model.layers.0.self_attn.rotary_emb.inv_freq": inv_freq}
    with_tensors(hf_dir, names)
    # when it is read, then it is the same tree
    after = dict(iter_leaves(hf_dir, config))
    assert after.keys() == before.keys()
    # and when one number of the head is another, the copies are named
    (hf_dir / "more.safetensors").unlink()
    (hf_dir / "first.safetensors").rename(hf_dir / "model.safetensors")
    head[-1, -1] += 1
    with_tensors(hf_dir, names)
    with pytest.raises(UserError, match=r"ties lm_head\.weight to the embedding, but they differ"):
        LeafReader(hf_dir, config)
