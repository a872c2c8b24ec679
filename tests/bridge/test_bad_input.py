"""Damaged and foreign input: one clear error, nothing under a final name."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bridge.conversion import export_checkpoint, import_model
from bridge.delta import write_delta
from bridge.safetensors_io import read_header, read_tensor, write_safetensors
from runspec.core.errors import UserError
from runspec.core.models.family import load_config
from tests.bridge.leaves import iter_leaves

from .conftest import MakeModel


@pytest.fixture
def model_and_checkpoint(make_model: MakeModel, tmp_path: Path) -> tuple[Path, Path]:
    hf_dir = make_model(tied=False, dtype="float32")
    checkpoint = tmp_path / "params"
    import_model(hf_dir, checkpoint)
    return hf_dir, checkpoint


def test_a_checkpoint_with_lost_data_is_named(
    model_and_checkpoint: tuple[Path, Path], tmp_path: Path
) -> None:
    hf_dir, checkpoint = model_and_checkpoint
    for file in checkpoint.glob("state/d/*"):
        file.unlink()

    with pytest.raises(UserError, match=r"leaf .* cannot be"):
        export_checkpoint(checkpoint, tmp_path / "out", model_dir=hf_dir, dtype="float32")

    assert not list(tmp_path.glob("*out*"))


@pytest.mark.parametrize("damage", ["absent", "empty", "metadata"])
def test_what_is_no_checkpoint_is_refused(
    model_and_checkpoint: tuple[Path, Path], tmp_path: Path, damage: str
) -> None:
    hf_dir, checkpoint = model_and_checkpoint
    if damage == "absent":
        checkpoint = tmp_path / "nowhere"
    elif damage == "empty":
        checkpoint = tmp_path / "empty"
        checkpoint.mkdir()
    else:
        next(checkpoint.glob("*/_METADATA")).write_text("{")

    with pytest.raises(UserError, match=str(checkpoint)):
        export_checkpoint(checkpoint, tmp_path / "out", model_dir=hf_dir, dtype="float32")


def test_another_models_checkpoint_is_refused(
    model_and_checkpoint: tuple[Path, Path], make_model: MakeModel, tmp_path: Path
) -> None:
    _, checkpoint = model_and_checkpoint
    other = make_model(tied=True, dtype="float32", name="other")

    with pytest.raises(UserError, match="leaves unexpected: head"):
        export_checkpoint(checkpoint, tmp_path / "out", model_dir=other, dtype="float32")


def test_an_export_overwrites_nothing(
    model_and_checkpoint: tuple[Path, Path], tmp_path: Path
) -> None:
    hf_dir, checkpoint = model_and_checkpoint
    (tmp_path / "out").mkdir()

    with pytest.raises(UserError, match="exists already"):
        export_checkpoint(checkpoint, tmp_path / "out", model_dir=hf_dir, dtype="float32")


@pytest.mark.parametrize("command", ["export", "import", "apply", "diff"])
def test_a_full_disk_leaves_nothing_behind(
    model_and_checkpoint: tuple[Path, Path], tmp_path: Path, command: str
) -> None:
    """The kernel's limit on file sizes stands in for the full disk: the same failed write()."""
    # given something to write for each command
    hf_dir, checkpoint = model_and_checkpoint
    write_delta(hf_dir, hf_dir, tmp_path / "delta")
    sources = {
        "export": [checkpoint],
        "import": [hf_dir],
        "apply": [hf_dir, tmp_path / "delta"],
        "diff": [hf_dir, hf_dir, "--out"],
    }
    limited = (
        "import resource, sys; from bridge.__main__ import main; "
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1500, 1500)); sys.exit(main(sys.argv[1:]))"
    )
    out = tmp_path / "out"
    # when it is carried out where that has no room
    done = subprocess.run(
        [sys.executable, "-c", limited, command, *sources[command], out],
        capture_output=True,
        text=True,
        timeout=60,
    )
    # then the error names the place, and nothing lies there
    assert done.returncode == 1
    assert f"error: {out}: cannot write" in done.stderr
    assert "File too large" in done.stderr
    assert not list(tmp_path.glob("*out*"))


@pytest.mark.parametrize("fault", ["missing", "unexpected", "shape"])
def test_tensors_that_do_not_fit_the_config_are_named(make_model: MakeModel, fault: str) -> None:
    hf_dir = make_model(tied=True, dtype="bfloat16")
    path = hf_dir / "config.json"
    edit = {
        "missing": {"num_hidden_layers": 4},
        "unexpected": {"num_hidden_layers": 2},
        "shape": {"intermediate_size": 28},
    }
    path.write_text(json.dumps(json.loads(path.read_text()) | edit[fault]))
    said = {
        "missing": "tensors missing: model.layers.3.input_layernorm.weight",
        "unexpected": "tensors unexpected: model.layers.2.input_layernorm.weight",
        "shape": "gate_proj.weight has shape",
    }

    with pytest.raises(UserError, match=said[fault]):
        list(iter_leaves(hf_dir, load_config(hf_dir)))


def test_an_index_cannot_name_files_elsewhere(make_model: MakeModel) -> None:
    hf_dir = make_model(tied=True, dtype="float32", max_shard_size="4KB")
    index = hf_dir / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"model.norm.weight": "../secret.safetensors"}}))

    with pytest.raises(UserError, match="outside its directory"):
        list(iter_leaves(hf_dir, load_config(hf_dir)))


def small_file(folder: Path) -> bytes:
    path = folder / "x.safetensors"
    path.unlink(missing_ok=True)
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    write_safetensors(path, {"x": (2, 3)}, array.dtype, [array])
    return path.read_bytes()


@settings(deadline=None)
@given(data=st.data())
def test_a_damaged_file_is_refused_or_read_within_its_bounds(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.getbasetemp()
    whole = bytearray(small_file(folder))
    cut = data.draw(st.integers(0, len(whole)))
    at, value = data.draw(st.integers(0, len(whole) - 1)), data.draw(st.integers(0, 255))
    whole[at] = value
    path = folder / "damaged.safetensors"
    path.write_bytes(whole[:cut])

    try:
        tensors = read_header(path)
    except UserError as error:
        assert str(path) in str(error)
        return
    for info in tensors.values():
        assert read_tensor(info).nbytes <= cut


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": [], "shape": [], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": 1, "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [1] * 9, "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [1], "data_offsets": "no"},
        {"dtype": "F32", "shape": [True], "data_offsets": [0, 4]},
        [],
    ],
)
def test_a_malformed_entry_of_a_header_is_refused(tmp_path: Path, entry: object) -> None:
    path = tmp_path / "x.safetensors"
    header = json.dumps({"x": entry}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))

    with pytest.raises(UserError, match=r"x\.safetensors: tensor x: malformed header"):
        read_header(path)
