"""Exported versions: a Hugging Face directory whose card says how to check it."""

from __future__ import annotations

import logging
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from bridge.__main__ import main as bridge
from bridge.publisher import Publisher
from runspec.core.errors import UserError
from runspec.core.run_files import weights_folder
from runspec.local.export import export_version
from tests.bridge.test_publisher import add_version
from tests.learner_jax.conftest import Run, tiny_spec, write_initial_model
from tests.runspec.local.test_evaluations import ZERO, store


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """A run with versions 0 and 1 published, the second evaluated."""
    run = Run(tmp_path / "run", tiny_spec())
    write_initial_model(run)
    for version in (0, 1):
        add_version(run, version)
    Publisher(run.path, run.spec, logging.getLogger("test")).publish_new()
    store(run.path, replace(ZERO, run=run.spec.name, version=1))
    return run


def test_an_export_loads_and_its_card_says_how_to_check_it(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # when the newest version is exported
    out = tmp_path / "exported"
    assert export_version(run.path, run.spec, None, out) == 1
    # then transformers loads it, and nothing of the run's own is there
    AutoModelForCausalLM.from_pretrained(out)
    assert not (out / "tensors.json").exists()
    # and the card has evaluation, recipe and digests
    card = (out / "README.md").read_text()
    assert "held-out: version 1: mean 0.25 (0.2 to 0.3)" in card
    assert f"# {run.spec.name}, version 1 of {run.spec.steps}" in card
    # and its command finds what was published
    [command] = [line.strip() for line in card.splitlines() if line.startswith("    python")]
    words = shlex.split(command)
    assert words[:3] == ["python", "-m", "bridge"]
    monkeypatch.chdir(out)
    assert bridge(words[3:]) == 0
    assert "as it was published" in capsys.readouterr().out
    # but no other weights under that name, no other file, and no other root
    config = out / "config.json"
    config.write_text(config.read_text() + " ")
    assert bridge(words[3:]) == 1
    assert "config.json is missing or not what was published" in capsys.readouterr().err
    assert bridge([*words[3:-1], "0" * 64]) == 1
    assert "cannot be believed" in capsys.readouterr().err


def test_a_damaged_version_is_not_exported(run: Run, tmp_path: Path) -> None:
    weights = weights_folder(run.path) / "v1" / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    with pytest.raises(UserError, match=r"not version 1 of .*: tensor .* is not what was exported"):
        export_version(run.path, run.spec, 1, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    # and another version still is
    assert export_version(run.path, run.spec, 0, tmp_path / "out") == 0


def test_what_is_not_there_is_named(run: Run, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="version 7 is not here; there are: 0, 1"):
        export_version(run.path, run.spec, 7, tmp_path / "out")
    (tmp_path / "out").mkdir()
    with pytest.raises(UserError, match="exists already"):
        export_version(run.path, run.spec, None, tmp_path / "out")
