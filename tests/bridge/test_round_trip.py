"""Hugging Face -> tree -> Orbax -> Hugging Face changes nothing."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch
from orbax.checkpoint import v1 as ocp
from transformers import AutoModelForCausalLM

from bridge.conversion import export_checkpoint, import_model
from bridge.load import LeafReader
from bridge.orbax_io import open_leaves, read_leaf
from bridge.safetensors_io import read_header, read_headers, read_tensor
from bridge.tensors import model_digest, tree_digests
from bridge.versions import differences
from bridge.weight_map import Path as LeafPath
from bridge.weight_map import weight_map
from runspec.core.models.family import load_config
from tests.bridge.leaves import iter_leaves

from .conftest import FAMILIES, MakeModel


def imported(hf_dir: Path) -> Path:
    checkpoint = hf_dir.parent / "v0" / "params"
    import_model(hf_dir, checkpoint)
    return checkpoint


def logits(directory: Path) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(directory)
    with torch.no_grad():
        return model(torch.arange(12).reshape(2, 6)).logits


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("family", FAMILIES)
def test_bits_and_logits_survive_the_round_trip(
    make_model: MakeModel, tmp_path: Path, family: str, tied: bool
) -> None:
    for dtype in ("float32", "bfloat16"):
        # given a model of odd sizes that transformers wrote
        hf_dir = make_model(tied=tied, dtype=dtype, family=family, name=f"{dtype}/hf")
        out = tmp_path / dtype / "out"
        # when it goes through a checkpoint
        export_checkpoint(imported(hf_dir), out, model_dir=hf_dir, dtype=dtype)
        # then every tensor is what it was, bit by bit
        assert differences(hf_dir, out) == []
        assert ("lm_head.weight" in read_headers(out)) is not tied
        assert json.loads((out / "config.json").read_text())["dtype"] == dtype
        # and transformers computes the same with it
        before, after = logits(hf_dir), logits(out)
        assert after.dtype == getattr(torch, dtype)
        assert torch.equal(before, after)


def test_a_checkpoint_that_was_imported_is_one_of_orbax(make_model: MakeModel) -> None:
    # given a model with a leaf of zeros, which TensorStore would leave out
    hf_dir = make_model(tied=False, dtype="bfloat16")
    zero_tensor(hf_dir / "model.safetensors", "model.norm.weight")
    leaves = dict(iter_leaves(hf_dir, load_config(hf_dir)))
    assert not leaves["final_norm", "weight"].any()
    # when it is imported
    checkpoint = imported(hf_dir)
    # then Orbax finds the same tree, of the same types, whatever else lies there
    stored = ocp.metadata(checkpoint).metadata
    assert leaves_of(ocp.load(checkpoint)).keys() == leaves_of(stored).keys() == leaves.keys()
    for path, leaf in leaves_of(ocp.load(checkpoint)).items():
        assert leaf.dtype == leaves[path].dtype
        np.testing.assert_array_equal(leaf, leaves[path])
    # and it lies on a device where a target says so
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    target = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=device), stored
    )
    on_device = leaves_of(ocp.load(checkpoint, target))["layers", "attention", "q", "weight"]
    assert isinstance(on_device, jax.Array)
    np.testing.assert_array_equal(on_device, leaves["layers", "attention", "q", "weight"])


def zero_tensor(path: Path, name: str) -> None:
    info = read_header(path)[name]
    with path.open("r+b") as file:
        file.seek(info.offset)
        file.write(bytes(info.nbytes))


def leaves_of(tree: Any) -> dict[LeafPath, Any]:
    flat = jax.tree_util.tree_leaves_with_path(tree)
    return {tuple(key.key for key in path): leaf for path, leaf in flat}


def test_a_narrower_export_rounds_to_nearest_even(make_model: MakeModel, tmp_path: Path) -> None:
    hf_dir = make_model(tied=False, dtype="float32")
    out = tmp_path / "out"

    export_checkpoint(imported(hf_dir), out, model_dir=hf_dir, dtype="bfloat16")

    wide, narrow = read_headers(hf_dir), read_headers(out)
    for name, info in narrow.items():
        rounded = torch.from_numpy(read_tensor(wide[name])).bfloat16().view(torch.int16).numpy()
        np.testing.assert_array_equal(read_tensor(info).view(np.int16), rounded)


def test_exports_are_deterministic_and_describe_themselves(
    make_model: MakeModel, tmp_path: Path
) -> None:
    hf_dir = make_model(tied=True, dtype="float32")
    checkpoint = imported(hf_dir)
    (checkpoint.parent / "probe.json").write_text('{"tokens": [1]}')

    for name in ("a", "b"):
        export_checkpoint(checkpoint, tmp_path / name, model_dir=hf_dir, dtype="float32")

    files = sorted(path.name for path in (tmp_path / "a").iterdir())
    assert files == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "probe.json",
        "tensors.json",
        "tokenizer.json",
    ]
    for name in files:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    config = load_config(hf_dir)
    said = json.loads((tmp_path / "a" / "tensors.json").read_text())
    flat = dict(iter_leaves(hf_dir, config))
    digests = {name: record["blake3"] for name, record in said["tensors"].items()}
    assert tree_digests(flat, config, "float32") == digests
    assert said["model_digest"] == model_digest(said["tensors"])


def test_sharded_files_are_read_and_written(make_model: MakeModel, tmp_path: Path) -> None:
    hf_dir = make_model(tied=False, dtype="float32", max_shard_size="4KB")
    assert (hf_dir / "model.safetensors.index.json").exists()
    out = tmp_path / "out"

    export_checkpoint(
        imported(hf_dir), out, model_dir=hf_dir, dtype="float32", max_shard_bytes=5000
    )

    assert len(list(out.glob("model-*.safetensors"))) > 3
    assert all(path.stat().st_size < 8000 for path in out.glob("model-*.safetensors"))
    assert differences(hf_dir, out) == []
    assert torch.equal(logits(hf_dir), logits(out))


@pytest.mark.parametrize(
    ("chunk_bytes", "axes"),
    [(None, None), (500, (0,)), (500, None)],
    ids=["whole leaves", "parts of a layer", "parts of all layers"],
)
def test_what_orbax_writes_is_exported_however_it_is_cut(
    make_model: MakeModel, tmp_path: Path, chunk_bytes: int | None, axes: tuple[int, ...] | None
) -> None:
    # given a checkpoint that Orbax itself wrote
    hf_dir = make_model(tied=False, dtype="float32")
    context = ocp.Context()
    context.array.saving.storage_options.chunk_byte_size = chunk_bytes
    context.array.saving.storage_options.shard_axes = axes
    with context:
        ocp.save(tmp_path / "params", tree_of(iter_leaves(hf_dir, load_config(hf_dir))))
    # when it is exported
    export_checkpoint(tmp_path / "params", tmp_path / "out", model_dir=hf_dir, dtype="float32")
    # then nothing has changed
    assert differences(hf_dir, tmp_path / "out") == []


def test_one_leaf_among_others_is_read_whole(make_model: MakeModel) -> None:
    # given a checkpoint, of which one leaf is wanted
    hf_dir = make_model(tied=False, dtype="bfloat16")
    checkpoint, path = imported(hf_dir), ("layers", "mlp", "gate", "weight")
    stores = open_leaves(checkpoint, {path: (3, 20, 29)}, among_others=True)
    # when it is read, then it is that of the model
    leaf = read_leaf(stores[path], path, place=checkpoint)
    np.testing.assert_array_equal(leaf, LeafReader(hf_dir, load_config(hf_dir)).read(path))


def tree_of(leaves: Iterable[tuple[LeafPath, np.ndarray]]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for path, leaf in leaves:
        node = tree
        for key in path[:-1]:
            node = node.setdefault(key, {})
        node[path[-1]] = leaf
    return tree


@pytest.mark.parametrize(
    ("family", "leaves"), [("qwen2", 15), ("qwen3", 18), ("llama", 12), ("mistral", 12)]
)
def test_the_map_covers_each_leaf_once_and_inverts_itself(
    make_model: MakeModel, family: str, leaves: int
) -> None:
    config = load_config(make_model(tied=False, dtype="float32", family=family))
    entries = weight_map(config)
    assert len({entry.path for entry in entries}) == len(entries) == leaves
    for entry in entries:
        # all numbers differ, so that each is seen to be in its place: matrices are transposed
        part = np.arange(math.prod(entry.shape), dtype=np.float32).reshape(entry.shape)
        matrix = len(entry.hf_shape) == 2 and entry.path != ("embed",)
        expected = part.reshape(entry.hf_shape[::-1]).T if matrix else part.reshape(entry.hf_shape)
        np.testing.assert_array_equal(entry.to_hf(part), expected, strict=True)
        np.testing.assert_array_equal(entry.to_tree(entry.to_hf(part)), part, strict=True)
