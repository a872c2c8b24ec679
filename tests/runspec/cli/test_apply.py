"""`runspec apply`: what it refuses, and what it says of a run that needs no more work."""

from __future__ import annotations

import shutil
import socket
from pathlib import Path

import pytest

from tests.harness import ROOT, TARGET_SHORT
from tests.runspec.cli.in_process import runspec
from tests.runspec.local.fake_run import prepared, small_spec

LAPTOP = ROOT / "specs" / "profiles" / "laptop.yaml"


def sets(*changes: str) -> list[str]:
    return [word for change in changes for word in ("--set", change)]


def squeezed(text: str) -> str:
    """The text without blanks and line breaks: a narrow terminal has others."""
    return "".join(text.split())


def apply(runs_dir: Path, *arguments: str):
    return runspec("apply", TARGET_SHORT, "--profile", "laptop", "--runs-dir", runs_dir, *arguments)


def test_a_full_run_on_a_laptop_says_in_one_screen_what_is_missing(tmp_path: Path) -> None:
    # given the full TARGET-LONG and a machine without a TPU
    spec = ROOT / "specs" / "target_long.yaml"
    # when it is applied
    done = runspec("apply", spec, "--runs-dir", tmp_path / "runs")
    # then everything that is missing is said at once, with a way out, and nothing was made
    assert done.returncode == 1
    for word in ("tpu-v5p x 4", "h100-80g x 8", "Qwen/QwQ-32B"):
        assert word in " ".join(done.stderr.split())
    assert f"runspec apply {spec} --profile laptop" in done.stderr
    assert len(done.stderr.splitlines()) <= 24
    assert not (tmp_path / "runs").exists()


def test_a_broken_spec_is_shown_with_its_place_and_makes_nothing(tmp_path: Path) -> None:
    done = apply(tmp_path / "runs", "--set", "optimizer.lr=fast")
    assert done.returncode == 1
    assert "optimizer.lr" in done.stderr
    assert not (tmp_path / "runs").exists()


def test_a_taken_port_is_named_and_nothing_is_made(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        done = apply(tmp_path / "runs", "--set", f"placement.base_port={port}")
    assert done.returncode == 1
    assert f"port {port} is taken" in done.stderr
    assert not (tmp_path / "runs").exists()


def test_a_finished_run_says_so(finished: Path) -> None:
    done = apply(finished, "--set", "name=small", "--set", "steps=5")
    assert done.returncode == 0, done.stderr
    assert "small is finished: all 5 steps are trained." in done.stdout
    assert f"{finished / 'small' / 'report.html'}" in done.stdout


def test_a_warning_is_shown_before_anything_else(finished: Path) -> None:
    changes = ("name=small", "steps=5", "algorithm.old_logprobs=recompute")
    done = apply(finished, *sets(*changes))
    assert "warning stale-pi-old: algorithm.old_logprobs" in done.stderr.splitlines()[0]


def test_another_spec_under_the_same_name_is_refused(finished: Path) -> None:
    done = apply(finished, "--set", "name=small", "--set", "steps=5", "--set", "seed=7")
    assert done.returncode == 1
    assert "seed: 42 there, 7 now" in done.stderr


def test_a_run_that_is_alive_elsewhere_exits_5(tmp_path: Path) -> None:
    with prepared(small_spec(), tmp_path):
        done = apply(tmp_path, "--set", "name=small", "--set", "steps=5")
    assert done.returncode == 5
    assert "the run is alive: held by process" in done.stderr


def test_a_detached_start_that_fails_shows_the_supervisor_s_last_words(tmp_path: Path) -> None:
    # given a run whose first stage cannot write its log
    (tmp_path / "small" / "logs" / "warm-start.log").mkdir(parents=True)
    # when it is applied in the background
    done = apply(tmp_path, "--set", "name=small", "--set", "steps=5", "--detach")
    # then the command ends with the reason
    assert done.returncode == 1
    assert "warm-start.log" in done.stderr


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the files of a small model, whose weights nothing reads."""
    folder = tmp_path_factory.mktemp("models") / "small"
    shutil.copytree(ROOT / "runspec" / "lint" / "examples" / "models" / "small", folder)
    (folder / "model.safetensors").write_bytes(bytes(8))
    return folder


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ([], "no directory {}"),
        (["tokenizer.json"], "the directory {} has no config.json, no *.safetensors"),
        (["config.json", "tokenizer.json"], "the directory {} has no *.safetensors"),
        (["config.json", "model.safetensors"], "the directory {} has no tokenizer.json"),
    ],
)
def test_a_directory_of_a_model_that_lacks_something_is_named_with_what(
    tmp_path: Path, model: Path, files: list[str], said: str
) -> None:
    folder = tmp_path / "models" / "mine"
    for name in files:
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copy(model / name, folder)
    words = ("model={hf: ./models/mine, shape: null}", "warm_start=null")
    spec = tmp_path / "spec.yaml"
    spec.write_text(f"extends: [{TARGET_SHORT}, {LAPTOP}]\n")
    done = runspec("apply", spec, "--runs-dir", tmp_path / "runs", *sets(*words))
    assert done.returncode == 1
    assert squeezed(said.format(folder)) in squeezed(done.stderr)
    assert "hf download" not in done.stderr
    assert not (tmp_path / "runs").exists()
