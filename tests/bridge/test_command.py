"""`python -m bridge`, as people and scripts call it."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from bridge.safetensors_io import SINGLE_NAME, read_header

from .conftest import MakeModel


def bridge(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "bridge", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def done(*arguments: object) -> list[str]:
    """The lines that a command prints which must succeed."""
    result = bridge(*arguments)
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()


def bump(directory: Path, name: str, count: int) -> None:
    """Changes the first numbers of a tensor by a bit."""
    path = directory / SINGLE_NAME
    info = read_header(path)[name]
    words = np.memmap(path, f"u{info.dtype.itemsize}", "r+", info.offset, (count,))
    words ^= 1
    words.flush()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_import_and_export_need_no_options(
    make_model: MakeModel, tmp_path: Path, dtype: str
) -> None:
    # given a model, which is imported and then gone
    hf_dir = make_model(tied=False, dtype=dtype)
    checkpoint, out, kept = tmp_path / "params", tmp_path / "out", tmp_path / "kept"
    done("import", hf_dir, checkpoint)
    hf_dir.rename(kept)
    # when the checkpoint is exported
    done("export", checkpoint, out)
    # then the weights are the same, and what belongs to them is there
    assert done("verify", kept, out) == ["the same weights"]
    assert json.loads((out / "config.json").read_text())["dtype"] == dtype
    assert (out / "tokenizer.json").read_bytes() == (kept / "tokenizer.json").read_bytes()


def test_a_config_beside_the_checkpoint_is_found(make_model: MakeModel, tmp_path: Path) -> None:
    # given a checkpoint without a config of its own, in a folder that has one
    hf_dir = make_model(tied=True, dtype="float32")
    checkpoint = tmp_path / "run" / "params"
    done("import", hf_dir, checkpoint)
    (checkpoint / "hugging_face").rename(tmp_path / "aside")
    missing = bridge("export", checkpoint, tmp_path / "out")
    shutil.copyfile(hf_dir / "config.json", checkpoint.parent / "config.json")
    # when it is exported, then it needs no option
    done("export", checkpoint, tmp_path / "out")
    assert done("verify", hf_dir, tmp_path / "out") == ["the same weights"]
    # and without that config it was told what to do
    assert missing.returncode == 1
    assert "no config.json in it or beside it\n  remedy: name the model's" in missing.stderr


def test_verify_names_what_differs(make_model: MakeModel) -> None:
    hf_dir = make_model(tied=False, dtype="float32")
    narrow = make_model(tied=True, dtype="bfloat16", name="narrow")

    result = bridge("verify", hf_dir, narrow)

    assert result.returncode == 1
    assert f"lm_head.weight: only in {hf_dir}" in result.stdout
    assert "model.norm.weight: dtype float32 and bfloat16" in result.stdout


def test_what_changed_is_told_and_applied(make_model: MakeModel, tmp_path: Path) -> None:
    # given a version, and the next, in which some numbers of two tensors are others
    old = make_model(tied=True, dtype="bfloat16")
    new, delta, out = (tmp_path / name for name in ("new", "delta", "out"))
    (old / "probe.json").write_text("of the old version")
    shutil.copytree(old, new)
    bump(new, "model.norm.weight", 3)
    bump(new, "model.layers.1.mlp.up_proj.weight", 7)
    # when they are compared
    told = done("diff", old, new)
    # then the changes are counted, with or without a delta
    assert done("diff", old, new, "--out", delta) == told
    assert told[0].startswith("model.layers.1.mlp.up_proj.weight: 7 of 580 elements, ")
    assert told[1].startswith("model.norm.weight: 3 of 20 elements, ")
    elements = sum(math.prod(info.shape) for info in read_header(new / SINGLE_NAME).values())
    assert told[2].startswith(f"10 of {elements} elements changed ({1000 / elements:.3g} %): ")
    assert [path.name for path in delta.iterdir()] == ["model.safetensors.delta"]
    # and the delta makes the new version of the old one, without its probe
    done("apply", old, delta, out)
    assert (out / SINGLE_NAME).read_bytes() == (new / SINGLE_NAME).read_bytes()
    assert json.loads((out / "tensors.json").read_text())["files"] == [SINGLE_NAME]
    assert not (out / "probe.json").exists()


def test_errors_are_one_message_and_exit_1(tmp_path: Path) -> None:
    result = bridge("export", tmp_path, tmp_path / "o", "--model-dir", tmp_path)

    assert result.returncode == 1
    assert result.stderr.startswith(
        f"error: {tmp_path}/config.json: cannot read the model's config"
    )
    assert "Traceback" not in result.stderr


def test_the_bridge_imports_no_jax() -> None:
    """The publisher exports with TensorStore alone; neither JAX nor Orbax may come along."""
    code = (
        "import sys, bridge.conversion, bridge.publisher, bridge.versions; "
        "print('jax' in sys.modules)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60
    )
    assert result.stdout == "False\n"
