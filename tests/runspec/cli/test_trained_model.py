"""What a run says of the model that it has trained, on a directory that the bridge wrote."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from bridge.conversion import export_checkpoint, import_model
from runspec.core.files import write_atomic
from sampler.tasks.traces import build_warm_start_data
from tests.runspec.cli.in_process import runspec
from tests.runspec.local.fake_run import prepared, small_spec
from tests.sampler.engine.models import save_version


@pytest.fixture
def runs_dir(finished: Path, tmp_path: Path) -> Path:
    """The folder of a finished run `small`, with a version that the bridge exported."""
    shutil.copytree(finished, tmp_path / "runs")
    initial = save_version(tmp_path / "initial")
    build_warm_start_data(small_spec()).write_tokenizer(initial)
    checkpoint = tmp_path / "v5" / "params"
    import_model(initial, checkpoint)
    version = tmp_path / "runs" / "small" / "weights" / "v5"
    export_checkpoint(checkpoint, version, model_dir=initial, dtype="float32")
    return tmp_path / "runs"


def test_the_printed_line_loads_a_model_that_generates(runs_dir: Path) -> None:
    # given a finished run
    folder = runs_dir / "small" / "weights" / "v5"
    described = runspec("describe", "small", "--runs-dir", runs_dir).stdout
    # then its directory is named, and nothing is missing in it
    assert f"version 5, the last, as a Hugging Face directory: {folder}" in described
    assert "it has no" not in described and "damaged" not in described
    # when somebody runs the line for transformers
    [line] = [text for text in described.splitlines() if "transformers: " in text]
    names: dict[str, Any] = {}
    exec(line.partition(": ")[2], names)
    # then the model answers, in the tokens that the roles know
    messages = [{"role": "user", "content": "Spell backward: stop"}]
    prompt = names["tokenizer"].apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    text = "Spell backward: stop\n<think>"
    own = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text, add_special_tokens=False)
    assert prompt["input_ids"].tolist() == [own.ids]
    output = names["model"].generate(**prompt, max_new_tokens=4, do_sample=False)
    assert output.shape[1] > len(own.ids)
    # and vLLM is not asked to choose a tokenizer for it
    assert f'vLLM: from vllm import LLM; model = LLM("{folder}", skip_tokenizer' in described


def test_the_end_of_a_run_names_the_model_and_what_is_missing(runs_dir: Path) -> None:
    folder = runs_dir / "small" / "weights" / "v5"
    (folder / "tokenizer.json").unlink()
    (folder / "model.safetensors").write_bytes(b"cut off")
    done = runspec("resume", "small", "--runs-dir", runs_dir)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("Trained model: version 5"))
    assert lines[at + 1].startswith(f"  it is damaged: {folder / 'model.safetensors'}")
    assert lines[at + 2] == "  it has no tokenizer.json"


def test_before_the_end_it_is_the_newest_version_that_is_out(runs_dir: Path) -> None:
    run_dir = runs_dir / "small"
    (run_dir / "weights" / "v5").rename(run_dir / "weights" / "v3")
    write_atomic(run_dir / "store/origin/small/versions/3/manifest.json", b"{}")
    (run_dir / "weights" / "v5").mkdir()
    shutil.rmtree(run_dir / "store/origin/small/versions/5")
    described = runspec("describe", "small", "--runs-dir", runs_dir).stdout
    assert "version 3, the newest published of 5, as a Hugging Face directory" in described


def test_a_run_that_published_nothing_has_none(tmp_path: Path) -> None:
    with prepared(small_spec(), tmp_path):
        pass
    described = runspec("describe", "small", "--runs-dir", tmp_path).stdout
    assert "Trained model\n  none" in described
