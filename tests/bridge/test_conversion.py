"""Hugging Face -> tree -> Orbax -> Hugging Face changes nothing; what is damaged or foreign is one
clear error, and nothing lies under a final name. Commands too."""

import json
import math
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch
from orbax.checkpoint import v1 as ocp
from transformers import AutoModelForCausalLM

from bridge.__main__ import main
from bridge.conversion import LeafReader, differences, export_checkpoint, import_model
from bridge.delta import write_delta
from bridge.orbax_io import open_leaves, read_leaf
from bridge.safetensors_io import SINGLE_NAME, read_header, read_headers, read_tensor
from bridge.tensors import model_digest, tree_digests
from bridge.weight_map import Path as LeafPath
from bridge.weight_map import file_header, hf_shapes, weight_map
from runspec.core.errors import UserError
from runspec.core.models.family import load_config, parse_config
from tests.bridge.conftest import FAMILIES, iter_leaves

pytestmark = pytest.mark.slow


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
def test_bits_and_logits_survive_the_round_trip(make_model, tmp_path, family, tied):
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


@pytest.mark.parametrize(
    ("family", "leaves"), [("qwen2", 15), ("qwen3", 18), ("llama", 12), ("mistral", 12)]
)
def test_the_map_covers_each_leaf_once_and_inverts_itself(make_model, family, leaves):
    config = load_config(make_model(family=family))
    entries = weight_map(config)
    assert len({entry.path for entry in entries}) == len(entries) == leaves
    for entry in entries:
        # all numbers differ, so that each is seen to be in its place: matrices are transposed
        part = np.arange(math.prod(entry.shape), dtype=np.float32).reshape(entry.shape)
        matrix = len(entry.hf_shape) == 2 and entry.path != ("embed",)
        expected = part.reshape(entry.hf_shape[::-1]).T if matrix else part.reshape(entry.hf_shape)
        np.testing.assert_array_equal(entry.to_hf(part), expected, strict=True)
        np.testing.assert_array_equal(entry.to_tree(entry.to_hf(part)), part, strict=True)


def tree_of(leaves: Iterable[tuple[LeafPath, np.ndarray]]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for path, leaf in leaves:
        node = tree
        for key in path[:-1]:
            node = node.setdefault(key, {})
        node[path[-1]] = leaf
    return tree


def leaves_of(tree: Any) -> dict[LeafPath, Any]:
    flat = jax.tree_util.tree_leaves_with_path(tree)
    return {tuple(key.key for key in path): leaf for path, leaf in flat}


def test_a_checkpoint_that_was_imported_is_one_of_orbax(make_model):
    # given a model with a leaf of zeros, which TensorStore would leave out
    hf_dir = make_model(dtype="bfloat16")
    info = read_header(hf_dir / SINGLE_NAME)["model.norm.weight"]
    with info.file.open("r+b") as file:
        file.seek(info.offset)
        file.write(bytes(info.nbytes))
    leaves = dict(iter_leaves(hf_dir, load_config(hf_dir)))
    assert not leaves["final_norm", "weight"].any()
    # when it is imported
    checkpoint, path = imported(hf_dir), ("layers", "mlp", "gate", "weight")
    # then Orbax finds the same tree, of the same types, whatever else lies there
    assert leaves_of(ocp.load(checkpoint)).keys() == leaves.keys()
    for each, leaf in leaves_of(ocp.load(checkpoint)).items():
        assert leaf.dtype == leaves[each].dtype
        np.testing.assert_array_equal(leaf, leaves[each])
    # and one leaf among others is read whole
    stores = open_leaves(checkpoint, {path: (3, 20, 29)}, among_others=True)
    found = read_leaf(stores[path], path, place=checkpoint)
    np.testing.assert_array_equal(found, LeafReader(hf_dir, load_config(hf_dir)).read(path))


@pytest.mark.parametrize(
    ("chunk_bytes", "axes"),
    [(None, None), (500, (0,)), (500, None)],
    ids=["whole leaves", "parts of a layer", "parts of all layers"],
)
def test_what_orbax_writes_is_exported_however_it_is_cut(make_model, tmp_path, chunk_bytes, axes):
    # given a checkpoint that Orbax itself wrote
    hf_dir = make_model()
    context = ocp.Context()
    context.array.saving.storage_options.chunk_byte_size = chunk_bytes
    context.array.saving.storage_options.shard_axes = axes
    with context:
        ocp.save(tmp_path / "params", tree_of(iter_leaves(hf_dir, load_config(hf_dir))))
    # when it is exported, then nothing has changed
    export_checkpoint(tmp_path / "params", tmp_path / "out", model_dir=hf_dir, dtype="float32")
    assert differences(hf_dir, tmp_path / "out") == []


@pytest.mark.parametrize("stored", ["float32", "float16"])
def test_a_narrower_export_rounds_to_nearest_even(make_model, tmp_path, stored):
    hf_dir, out = make_model(dtype=stored), tmp_path / "out"
    export_checkpoint(imported(hf_dir), out, model_dir=hf_dir, dtype="bfloat16")
    wide = read_headers(hf_dir)
    for name, info in read_headers(out).items():
        rounded = torch.from_numpy(read_tensor(wide[name])).bfloat16().view(torch.int16).numpy()
        np.testing.assert_array_equal(read_tensor(info).view(np.int16), rounded)


def test_exports_are_deterministic_and_describe_themselves(make_model, tmp_path):
    hf_dir = make_model(tied=True)
    checkpoint, config = imported(hf_dir), load_config(hf_dir)
    (checkpoint.parent / "probe.json").write_text('{"tokens": [1]}')
    for name in ("a", "b"):
        export_checkpoint(checkpoint, tmp_path / name, model_dir=hf_dir, dtype="float32")
    files, again = (
        {path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in "ab"
    )
    assert files == again
    assert sorted(files) == [
        *("config.json", "generation_config.json", "model.safetensors"),
        *("probe.json", "tensors.json", "tokenizer.json"),
    ]
    said = json.loads(files["tensors.json"])
    digests = {name: record["blake3"] for name, record in said["tensors"].items()}
    assert tree_digests(dict(iter_leaves(hf_dir, config)), config, "float32") == digests
    assert said["model_digest"] == model_digest(said["tensors"])


def test_sharded_files_are_read_and_written(make_model, tmp_path):
    hf_dir, out = make_model(max_shard_size="4KB"), tmp_path / "out"
    assert (hf_dir / "model.safetensors.index.json").exists()
    checkpoint = imported(hf_dir)
    export_checkpoint(checkpoint, out, model_dir=hf_dir, dtype="float32", max_shard_bytes=5000)
    assert len(list(out.glob("model-*.safetensors"))) > 3
    assert all(path.stat().st_size < 8000 for path in out.glob("model-*.safetensors"))
    assert differences(hf_dir, out) == []
    assert torch.equal(logits(hf_dir), logits(out))


def lose_data(checkpoint: Path) -> None:
    for file in checkpoint.glob("state/d/*"):
        file.unlink()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lose_data, r"leaf .* cannot be"),
        (shutil.rmtree, "params"),
        (lambda checkpoint: (shutil.rmtree(checkpoint), checkpoint.mkdir()), "params"),
        (lambda checkpoint: next(checkpoint.glob("*/_METADATA")).write_text("{"), "params"),
        (lambda checkpoint: (checkpoint.parents[1] / "out").mkdir(), "out: exists already"),
    ],
)
def test_what_cannot_be_exported_is_named_and_leaves_nothing(make_model, tmp_path, damage, message):
    hf_dir = make_model()
    checkpoint = imported(hf_dir)
    damage(checkpoint)
    with pytest.raises(UserError, match=message):
        export_checkpoint(checkpoint, tmp_path / "out", model_dir=hf_dir, dtype="float32")
    assert [path for path in tmp_path.glob("*out*") if "exists" not in message] == []


Bridge = Callable[..., tuple[int, list[str], str]]


@pytest.fixture
def bridge(capsys: pytest.CaptureFixture[str]) -> Bridge:
    """`python -m bridge` in this process: exit code, lines of stdout, and stderr."""

    def call(*arguments: object) -> tuple[int, list[str], str]:
        code = main([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        return code, out.splitlines(), err

    return call


def test_import_and_export_need_no_options(make_model, tmp_path, bridge):
    # given a model, which is imported and then gone
    hf_dir = make_model(dtype="bfloat16")
    checkpoint, out, kept = tmp_path / "run" / "params", tmp_path / "out", tmp_path / "kept"
    assert bridge("import", hf_dir, checkpoint)[0] == 0
    hf_dir.rename(kept)
    # when the checkpoint is exported, then the weights are the same, and what belongs to them too
    assert bridge("export", checkpoint, out)[0] == 0
    assert bridge("verify", kept, out)[:2] == (0, ["the same weights"])
    code, lines, _ = bridge("verify", kept, make_model(tied=True, name="other"))
    assert code == 1 and f"lm_head.weight: only in {kept}" in lines
    # and it is no checkpoint of another model
    with pytest.raises(UserError, match="leaves unexpected: head"):
        export_checkpoint(checkpoint, out / "x", model_dir=tmp_path / "other", dtype="float32")
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"
    assert (out / "tokenizer.json").read_bytes() == (kept / "tokenizer.json").read_bytes()
    # given a checkpoint without a config of its own, then it is said what to do
    (checkpoint / "hugging_face").rename(tmp_path / "aside")
    code, _, said = bridge("export", checkpoint, tmp_path / "again")
    assert code == 1 and "Traceback" not in said
    assert "no config.json in it or beside it\n  remedy: name the model's" in said
    # and one beside it is found
    shutil.copyfile(kept / "config.json", checkpoint.parent / "config.json")
    assert bridge("export", checkpoint, tmp_path / "again")[0] == 0
    assert differences(kept, tmp_path / "again") == []


def test_what_changed_is_told_and_applied(make_model, tmp_path, bridge):
    # given a version, and the next, in which some numbers of two tensors are others
    old = make_model(tied=True, dtype="bfloat16")
    new, delta, out = (tmp_path / name for name in ("new", "delta", "out"))
    (old / "probe.json").write_text("of the old version")
    shutil.copytree(old, new)
    for name, count in (("model.norm.weight", 3), ("model.layers.1.mlp.up_proj.weight", 7)):
        info = read_header(new / SINGLE_NAME)[name]
        words = np.memmap(info.file, "u2", "r+", info.offset, (count,))
        words ^= 1
        words.flush()
    # when they are compared, then the changes are counted, with or without a delta
    code, told, _ = bridge("diff", old, new, "--out", delta)
    assert code == 0 and told[1].startswith("model.norm.weight: 3 of 20 elements, ")
    # and the delta makes the new version of the old one, without its probe
    assert bridge("apply", old, delta, out)[0] == 0
    assert (out / SINGLE_NAME).read_bytes() == (new / SINGLE_NAME).read_bytes()
    assert json.loads((out / "tensors.json").read_text())["files"] == [SINGLE_NAME]
    assert not (out / "probe.json").exists()


@pytest.mark.parametrize("command", ["export", "import", "apply", "diff"])
def test_a_full_disk_leaves_nothing_behind(make_model, tmp_path, bridge, command):
    """The kernel's limit on file sizes stands in for the full disk: the same failed write()."""
    # given something to write for each command
    hf_dir = make_model()
    checkpoint, out = imported(hf_dir), tmp_path / "out"
    write_delta(hf_dir, hf_dir, tmp_path / "delta")
    sources = {
        "export": [checkpoint],
        "import": [hf_dir],
        "apply": [hf_dir, tmp_path / "delta"],
        "diff": [hf_dir, hf_dir, "--out"],
    }
    # when it is carried out where that has no room
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1500, limits[1]))
    try:
        code, _, said = bridge(command, *sources[command], out)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    # then the error names the place, and nothing lies there
    assert code == 1 and f"{out}: cannot write" in said and "File too large" in said
    assert not list(tmp_path.glob("*out*"))


PEAK = """
import sys
from bridge.__main__ import main
assert main(sys.argv[1:]) == 0
lines = dict(line.split(":", 1) for line in open("/proc/self/status"))
print(int(lines["VmHWM"].split()[0]) * 1024)
"""


def in_a_process(code: str, *arguments: object) -> str:
    words = [sys.executable, "-c", code, *map(str, arguments)]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()[-1]


def test_the_bridge_imports_no_jax():
    """The publisher exports with TensorStore alone; neither JAX nor Orbax may come along."""
    code = "import sys, bridge.conversion, bridge.publisher"
    assert in_a_process(f"{code}; print('jax' in sys.modules)") == "False"


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's count of peak memory")
def test_import_and_export_hold_a_few_tensors_of_a_model(tmp_path):
    # given a model of 640 MB whose largest tensor has 61 MB, as a sparse file: all zeros
    hf_dir, checkpoint, out = (tmp_path / name for name in ("hf", "params", "out"))
    sizes = {"vocab_size": 30_001, "hidden_size": 1024, "intermediate_size": 10_243}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2, "num_hidden_layers": 8}
    common = {"max_position_embeddings": 64, "rms_norm_eps": 1e-6, "dtype": "bfloat16"}
    fields = {"model_type": "llama", **sizes, **heads, **common}
    shapes = dict(hf_shapes(parse_config(fields, place="test")))
    nbytes = [2 * math.prod(shape) for shape in shapes.values()]
    hf_dir.mkdir()
    (hf_dir / "config.json").write_text(json.dumps(fields))
    with (hf_dir / SINGLE_NAME).open("xb") as file:
        header = file_header(shapes, "BF16", 2)
        file.write(header)
        file.truncate(len(header) + sum(nbytes))
    bound = 2.5 * max(nbytes) + 300e6
    assert sum(nbytes) > 1.4 * bound
    # when it is imported and exported, then neither takes more than the bound
    assert int(in_a_process(PEAK, "import", hf_dir, checkpoint)) < bound
    assert int(in_a_process(PEAK, "export", checkpoint, out)) < bound
    assert differences(hf_dir, out) == []
