"""`python -m bridge`, as people and scripts call it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from .conftest import MakeModel


def bridge(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "bridge", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_import_export_verify(make_model: MakeModel, tmp_path: Path) -> None:
    hf_dir = make_model(tied=False, dtype="float32")
    checkpoint, out = tmp_path / "params", tmp_path / "out"

    assert bridge("import", hf_dir, checkpoint).returncode == 0
    done = bridge("export", checkpoint, out, "--model-dir", hf_dir, "--dtype", "float32")
    assert done.returncode == 0, done.stderr

    same = bridge("verify", hf_dir, out)
    assert (same.returncode, same.stdout) == (0, "the same weights\n")


def test_verify_names_what_differs(make_model: MakeModel) -> None:
    hf_dir = make_model(tied=False, dtype="float32")
    narrow = make_model(tied=True, dtype="bfloat16", name="narrow")

    done = bridge("verify", hf_dir, narrow)

    assert done.returncode == 1
    assert f"lm_head.weight: only in {hf_dir}" in done.stdout
    assert "model.norm.weight: dtype float32 and bfloat16" in done.stdout


def test_errors_are_one_message_and_exit_1(tmp_path: Path) -> None:
    done = bridge("export", tmp_path, tmp_path / "o", "--model-dir", tmp_path, "--dtype", "float32")

    assert done.returncode == 1
    assert done.stderr.startswith(f"error: {tmp_path}/config.json: cannot read the model's config")
    assert "Traceback" not in done.stderr


def test_the_bridge_imports_no_jax() -> None:
    """The publisher exports with TensorStore alone; neither JAX nor Orbax may come along."""
    code = "import sys, bridge.export, bridge.load, bridge.compare; print('jax' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "False\n"
