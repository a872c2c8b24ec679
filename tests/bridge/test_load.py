"""Reading weights: the right numbers, in order, no byte more than they take, and from nowhere else;
the flat vector of a model, and the versions that an engine has loaded."""

import json
import math
import shutil
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tensorstore as ts
from hypothesis import given, settings
from hypothesis import strategies as st

from bridge.conversion import LeafReader
from bridge.model_files import VersionedPrefill
from bridge.orbax_io import leaf_spec, read_pieces
from bridge.safetensors_io import (
    read_header,
    read_headers,
    read_tensor,
    write_safetensors,
)
from bridge.tensors import FlatLayout, contiguous, copy_into
from bridge.weight_map import entry, hf_shapes, weight_map
from runspec.core.errors import UserError
from runspec.core.models.family import Row, load_config, parse_config
from tests.bridge.conftest import FAMILIES, iter_leaves
from verify.plugins import WeightsLocation

SPREAD = 300
"""What reading the counter itself may add to it, in bytes."""
DTYPES = [np.float32, ml_dtypes.bfloat16]


def bytes_read() -> int:
    """Bytes that this thread has asked the kernel for, ever."""
    lines = Path("/proc/thread-self/io").read_text().splitlines()
    return int(dict(line.split(": ") for line in lines)["rchar"])


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's counter of bytes")
def test_a_part_of_a_leaf_takes_its_own_bytes_only(tmp_path):
    # given a model, large enough that a part of it is told from the whole by its bytes
    sizes = {"vocab_size": 64, "hidden_size": 96, "intermediate_size": 160, "head_dim": 32}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 3}
    common = {"attention_bias": True, "max_position_embeddings": 64, "rms_norm_eps": 1e-6}
    fields = {"model_type": "qwen3", **sizes, **heads, **common}
    config = parse_config(fields, place="config.json")
    shapes, rng = dict(hf_shapes(config)), np.random.default_rng(0)
    data = (rng.normal(size=shape).astype(np.float32) for shape in shapes.values())
    write_safetensors(tmp_path / "model.safetensors", shapes, np.dtype(np.float32), data)
    # and the whole of each leaf
    reader, whole = LeafReader(tmp_path, config), dict(iter_leaves(tmp_path, config))
    for each in weight_map(config):
        for axis, size in enumerate(each.leaf_shape):
            # when the second half of a leaf is read, along each of its dimensions
            index = (slice(None),) * axis + (slice(size // 2, size),)
            index += (slice(None),) * (len(each.leaf_shape) - axis - 1)
            before = bytes_read()
            part = reader.read(each.path, index)
            count = bytes_read() - before
            # then it is that half, and so much was read
            np.testing.assert_array_equal(part, whole[each.path][index])
            assert part.flags.c_contiguous
            assert part.nbytes <= count <= part.nbytes + SPREAD, (each.path, index)


def test_a_file_that_shrinks_while_it_is_read_is_an_error_that_names_the_tensor(make_model):
    # given a model whose headers were read whole
    hf_dir = make_model()
    reader = LeafReader(hf_dir, load_config(hf_dir))
    info = read_header(hf_dir / "model.safetensors")["model.layers.1.mlp.up_proj.weight"]
    # when its file is cut off inside a tensor, or goes, then reading says which tensor
    with info.file.open("r+b") as file:
        file.truncate(info.offset + 7)
    with pytest.raises(UserError, match=r"model\.layers\.1\.mlp\.up_proj\.weight: the file became"):
        reader.read(("layers", "mlp", "up", "weight"))
    info.file.unlink()
    with pytest.raises(UserError, match=r"up_proj\.weight: cannot read: No such file"):
        reader.read(("layers", "mlp", "up", "weight"))


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        ({"num_hidden_layers": 4}, "tensors missing: model.layers.3.input_layernorm.weight"),
        ({"num_hidden_layers": 2}, "tensors unexpected: model.layers.2.input_layernorm.weight"),
        ({"intermediate_size": 28}, "gate_proj.weight has shape"),
    ],
)
def test_tensors_that_do_not_fit_the_config_are_named(make_model, edit, message):
    hf_dir = make_model(tied=True, dtype="bfloat16")
    path = hf_dir / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | edit))
    with pytest.raises(UserError, match=message):
        LeafReader(hf_dir, load_config(hf_dir))


def test_float16_is_read_as_float32_of_the_same_values(make_model):
    # given a model in float16, with the values at the ends of the type
    hf_dir = make_model(dtype="float16")
    info = read_header(hf_dir / "model.safetensors")["model.embed_tokens.weight"]
    ends = np.array([0, 0x8000, 1, 0x83FF, 0x0400, 0x7BFF, 0xFBFF, 0x7C00], "<u2")
    with info.file.open("r+b") as file:
        file.seek(info.offset)
        file.write(ends.tobytes())
    # when its leaves are read, then each is the stored one, exactly
    reader, stored = LeafReader(hf_dir, load_config(hf_dir)), read_headers(hf_dir)
    for path, leaf in reader.entries.items():
        assert reader.dtype(path) == np.float32
        parts = [leaf.to_tree(read_tensor(stored[name])) for name in leaf.tensor_names()]
        expected = np.stack(parts).astype(np.float32).reshape(leaf.leaf_shape)
        np.testing.assert_array_equal(reader.read(path), expected, strict=True)
        np.testing.assert_array_equal(
            np.concatenate([*reader.parts(path)]).ravel(), expected.ravel()
        )
    assert reader.read(("embed",)).ravel()[:8].astype("<f2").tobytes() == ends.tobytes()


@pytest.mark.parametrize("code", ["F64", "F8_E4M3", "I8"])
def test_a_dtype_that_is_not_read_comes_with_a_remedy(tmp_path, code):
    header = json.dumps({"x": {"dtype": code, "shape": [1], "data_offsets": [0, 8]}}).encode()
    path = tmp_path / "x.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    with pytest.raises(UserError, match=f"x: dtype {code}, not F32, BF16, F16\n.*convert"):
        read_header(path)


def test_an_index_cannot_name_files_elsewhere(make_model):
    hf_dir = make_model(tied=True, max_shard_size="4KB")
    index = hf_dir / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"model.norm.weight": "../secret.safetensors"}}))
    with pytest.raises(UserError, match="outside its directory"):
        LeafReader(hf_dir, load_config(hf_dir))


def test_a_tied_model_may_be_stored_with_its_head_if_it_is_the_embedding(make_model):
    # given a tied model whose files hold the head too, and constants that old checkpoints hold
    hf_dir = make_model(tied=True)
    config = load_config(hf_dir)
    before = dict(iter_leaves(hf_dir, config))
    inv_freq = "model.layers.0.self_attn.rotary_emb.inv_freq"
    extra = {inv_freq: np.ones(2, np.float32), "lm_head.weight": before["embed",]}
    shapes = {name: array.shape for name, array in extra.items()}
    more = hf_dir / "more.safetensors"
    write_safetensors(more, shapes, np.dtype(np.float32), extra.values())
    listing = {
        name: file.name for file in hf_dir.glob("*.safetensors") for name in read_header(file)
    }
    (hf_dir / "model.safetensors.index.json").write_text(json.dumps({"weight_map": listing}))
    # when it is read, then it is the same tree
    assert dict(iter_leaves(hf_dir, config)).keys() == before.keys()
    # and when the last number of the head is another, the copies are named
    more.write_bytes(more.read_bytes()[:-4] + np.float32(7.0).tobytes())
    with pytest.raises(UserError, match=r"ties lm_head\.weight to the embedding, but they differ"):
        LeafReader(hf_dir, config)


@pytest.mark.parametrize(("tied", "message"), [(True, ""), (False, "missing: model.embed_tokens")])
def test_a_tied_model_may_be_stored_with_its_head_alone(make_model, tied, message):
    # given a model whose file has the head and no embedding
    hf_dir = make_model(tied=True)
    path, old, new = hf_dir / "model.safetensors", b"model.embed_tokens.weight", b"lm_head.weight"
    before = dict(iter_leaves(hf_dir, load_config(hf_dir)))
    path.write_bytes(path.read_bytes().replace(old + b'"', new + b'"' + b" " * 11))
    config = json.loads((hf_dir / "config.json").read_text()) | {"tie_word_embeddings": tied}
    (hf_dir / "config.json").write_text(json.dumps(config))
    # when it is read, then the head is the embedding if the config ties them
    with pytest.raises(UserError, match=message) if message else nullcontext():
        after = dict(iter_leaves(hf_dir, load_config(hf_dir)))
        assert {path: leaf.tobytes() for path, leaf in after.items()} == {
            path: leaf.tobytes() for path, leaf in before.items()
        }


def test_a_malformed_entry_of_a_header_is_refused(tmp_path):
    path = tmp_path / "x.safetensors"
    for kind, shape, offsets in (([], [], [0, 4]), ("F32", [1] * 9, [0, 4]), ("F32", [1], "no")):
        entry = {"dtype": kind, "shape": shape, "data_offsets": offsets}
        header = json.dumps({"x": entry}).encode()
        path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
        with pytest.raises(UserError, match=r"x\.safetensors: tensor x: malformed header"):
            read_header(path)


@settings(derandomize=True)
@given(data=st.data())
def test_a_damaged_file_is_refused_or_read_within_its_bounds(data, tmp_path_factory):
    path = tmp_path_factory.getbasetemp() / "damaged.safetensors"
    path.unlink(missing_ok=True)
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    write_safetensors(path, {"x": (2, 3)}, array.dtype, [array])
    whole = bytearray(path.read_bytes())
    cut = data.draw(st.integers(0, len(whole)))
    whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(whole[:cut])
    try:
        tensors = read_header(path)
    except UserError as error:
        assert str(path) in str(error)
        return
    for info in tensors.values():
        assert read_tensor(info).nbytes <= cut


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_flat_vector_is_the_hugging_face_tensors_one_after_the_other_and_back(
    make_model, family, tied
):
    # given a model that transformers wrote
    directory = make_model(tied=tied, family=family)
    config = load_config(directory)
    layout, leaves = FlatLayout(config), dict(iter_leaves(directory, config))
    # when flattened, then it is its tensors, in the map's order
    flat, headers = layout.flatten(leaves), read_headers(directory)
    tensors = [read_tensor(headers[name]).reshape(-1) for name, _ in hf_shapes(config)]
    assert flat.dtype == np.float32 and flat.shape == (layout.size,)
    np.testing.assert_array_equal(flat, np.concatenate(tensors))
    # and the leaves come back
    back = dict(layout.leaves(flat))
    assert list(back) == list(LeafReader(directory, config).entries)
    for path, leaf in leaves.items():
        np.testing.assert_array_equal(back[path], leaf, strict=True)


SIZES = {"L": 3, "D": 7, "F": 5}
ENTRIES = [
    entry(Row("layers.up", "up.{i}", "L D F", "F D"), SIZES),
    entry(Row("norm", "norm", "D", "D"), SIZES),
    entry(Row("layers.down", "down.{i}", "L F D", "D F"), SIZES),
]


@pytest.mark.parametrize("ahead_bytes", [0, 300])
@pytest.mark.parametrize("chunk", [[1, 2, 3], [2, 2, 3], [3, 7, 7]], ids=str)
def test_reading_ahead_changes_neither_what_is_read_nor_its_order(tmp_path, chunk, ahead_bytes):
    # given leaves of different numbers that are cut into chunks of some shape
    numbers, stores = {}, {}
    for leaf in ENTRIES:
        shape = leaf.leaf_shape
        numbers[leaf.path] = np.arange(math.prod(shape), dtype=np.float32).reshape(shape)
        layout = ts.ChunkLayout(chunk_shape=chunk[-len(shape) :])
        options = {"create": True, "dtype": ts.float32, "shape": shape, "chunk_layout": layout}
        stores[leaf.path] = ts.open(leaf_spec(tmp_path, leaf.path), **options).result()
        stores[leaf.path].write(numbers[leaf.path]).result()
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
    for path, wanted in numbers.items():
        np.testing.assert_array_equal(found[path], wanted)


@st.composite
def shapes_and_orders(draw: st.DrawFn) -> tuple[list[int], list[int], list[int]]:
    shape = draw(st.lists(st.sampled_from([0, 1, 2, 3, 140]), min_size=1, max_size=3))
    order = st.permutations(range(len(shape)))
    return shape, draw(order), draw(order)


def laid(shape: list[int], order: list[int], dtype: type) -> np.ndarray:
    """An empty array whose dimensions lie in memory in an order, in the middle of a larger one."""
    outer = np.empty([shape[axis] + 2 for axis in order], dtype)
    return outer[(slice(1, -1),) * len(shape)].transpose(np.argsort(order))


@settings(derandomize=True, max_examples=60)
@given(shapes_and_orders(), st.sampled_from(DTYPES))
def test_a_copy_between_orders_of_dimensions_is_the_array(case, dtype):
    # given an array and room for it, each in its own order
    shape, first, second = case
    source, target = laid(shape, first, dtype), laid(shape, second, dtype)
    source[...] = np.random.default_rng(0).normal(size=shape)
    # when it is copied, then all of it is there, and as C-contiguous too
    copy_into(target, source)
    np.testing.assert_array_equal(target, source)
    np.testing.assert_array_equal(contiguous(source), source)
    assert contiguous(source).flags.c_contiguous


class Shelves:
    """Stands for relays, where every version is there, and for a device of so many versions."""

    def __init__(self, folder: Path, room: int, count: int, monkeypatch: Any) -> None:
        self._folder, self._room = folder, room
        self.loads: list[str] = []
        monkeypatch.setattr("bridge.model_files.WeightsClient", lambda *_, **__: self)
        spec: Any = SimpleNamespace(grpo=SimpleNamespace(async_level=count - 1))
        weights = WeightsLocation("run", (), "", folder)
        self.versions = VersionedPrefill(
            spec, weights, load=self.load, has_room=self.has_room, compute=lambda *_, **__: []
        )

    def fetch(self, version: int, *, manifest_digest: str | None, deadline_s: float) -> Path:
        path = self._folder / f"v{version}"
        path.mkdir(exist_ok=True)
        for part in (1, 2):
            (path / f"model-{part}.safetensors").write_bytes(b"12345")
        return path

    def prune(self, keep: set[int]) -> None:
        for path in self._folder.glob("v*"):
            if int(path.name[1:]) not in keep:
                shutil.rmtree(path)

    def load(self, path: Path) -> str:
        self.loads.append(path.name)
        return path.name

    def has_room(self, size: int) -> bool:
        return len(self.versions._loaded) + size / 10 <= self._room


@pytest.mark.parametrize(
    ("room", "loads"),
    [
        # room for all: each is loaded once, but for the one dropped by the count
        (100, "v0 v1 v2 v3 v0"),
        # room for two: the one that was used longest ago makes way
        (2, "v0 v1 v2 v1 v3 v0"),
        # room for none beside another, and even then one is loaded
        (0, "v0 v1 v0 v2 v1 v3 v0"),
    ],
)
def test_versions_are_dropped_by_use_where_the_device_is_full(tmp_path, room, loads, monkeypatch):
    shelves = Shelves(tmp_path, room, 3, monkeypatch)
    for version in (0, 1, 0, 2, 1, 1, 3, 0):
        shelves.versions.ensure_version(version, "ab", deadline_s=1)
        assert shelves.versions.get(version) == f"v{version}"
    assert shelves.loads == loads.split()
    # and one version more than the count stays on disk
    assert sorted(path.name for path in tmp_path.iterdir()) == ["v0", "v1", "v2", "v3"]
