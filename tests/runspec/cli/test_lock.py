"""`runspec lock`: what it writes, what it prints, how it exits; `apply` holds to it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from runspec.cli.apply import apply_command
from runspec.cli.lock import lock_command
from runspec.core.errors import UserError
from runspec.core.spec.load import SpecFiles
from runspec.core.spec.lock_file import read_lock
from tests.runspec.core.spec.spec_files import SPECS, small_spec, write
from tests.runspec.lock.repository import COMMIT, hub, write_model

LOCAL = "model: {hf: policy}"


@pytest.fixture(autouse=True)
def no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is asked of the real Hub, and nothing is taken from this machine's cache."""
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "no-cache"))
    for name in ("HF_HUB_CACHE", "HF_HUB_OFFLINE", "HF_TOKEN"):
        monkeypatch.delenv(name, raising=False)


def test_it_writes_a_lock_that_holds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_model(tmp_path / "policy")
    files = SpecFiles(small_spec(tmp_path, LOCAL))
    assert lock_command(files, check=False, full=False) == 0
    assert capsys.readouterr().out == f"wrote {tmp_path}/spec.lock.yaml\n"
    assert lock_command(files, check=True, full=False) == 0
    assert "holds" in capsys.readouterr().out
    # when the model changes under its name
    (folder / "config.json").write_text("{}")
    assert lock_command(files, check=True, full=False) == 1
    assert capsys.readouterr().out.startswith("model: config.json is not the file of the lock")


def test_large_files_are_named_while_they_are_digested(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("runspec.cli.lock._WORTH_A_LINE", 30)
    write_model(tmp_path / "policy", weights=bytes(10**6))
    assert lock_command(SpecFiles(small_spec(tmp_path, LOCAL)), check=False, full=False) == 0
    assert "digesting model.safetensors, 0.0 GB\n" in capsys.readouterr().err


def test_there_must_be_a_lock_to_check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert lock_command(SpecFiles(small_spec(tmp_path)), check=True, full=False) == 1
    assert "spec.lock.yaml is not there" in capsys.readouterr().out


def test_commits_are_asked_of_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = small_spec(tmp_path, "model: {hf: some/model}")
    with hub() as server:
        server.answers = {
            "/api/models/some/model/revision/main": [json.dumps({"sha": COMMIT}).encode()]
        }
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        assert lock_command(SpecFiles(path), check=False, full=False) == 0
    made = read_lock(path)
    assert made is not None and made.model is not None and made.model.commit == COMMIT
    # then checking asks nobody
    assert lock_command(SpecFiles(path), check=True, full=False) == 0


def test_a_name_that_cannot_be_pinned_leaves_nothing_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = small_spec(tmp_path, "model: {hf: some/model}")
    assert lock_command(SpecFiles(path), check=False, full=False) == 1
    said = capsys.readouterr().err
    assert "error: model: http://127.0.0.1:1/api/models/some/model" in said
    assert "nothing was written" in said and read_lock(path) is None


def test_what_no_lock_can_hold_is_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_model(tmp_path / "policy")
    web = "data.sources=[{name: web, kind: parquet, uri: 'https://example.org/a.parquet'}]"
    files = SpecFiles(small_spec(tmp_path, LOCAL), overrides=[web])
    assert lock_command(files, check=False, full=False) == 0
    assert "warning: data.sources.web: https://example.org" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("files", "code"),
    [
        (SpecFiles(Path("gone.yaml")), 2),
        (SpecFiles(SPECS / "placements" / "h200.yaml"), 2),
        (SpecFiles(SPECS / "target_short.yaml", overrides=["steps=no"]), 1),
    ],
)
def test_what_is_no_spec(files: SpecFiles, code: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert lock_command(files, check=False, full=False) == code
    assert capsys.readouterr().err


def test_a_damaged_lock_exits_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = small_spec(tmp_path)
    write(tmp_path / "spec.lock.yaml", "version: 1")
    assert lock_command(SpecFiles(path), check=True, full=False) == 2
    assert "make it again" in capsys.readouterr().err


def test_apply_refuses_what_is_not_what_was_locked(tmp_path: Path) -> None:
    # given a lock of the laptop's data, and other parameters than it has
    spec = write(
        tmp_path / "spec.yaml",
        f"extends: [{SPECS}/target_short.yaml, {SPECS}/profiles/laptop.yaml]",
    )
    assert lock_command(SpecFiles(spec), check=False, full=False) == 0
    other = SpecFiles(spec, overrides=["data.sources.spell_backward.size=19999"])
    runs = tmp_path / "runs"
    with pytest.raises(UserError, match=r"data\.sources\.spell_backward: other parameters"):
        apply_command(other, True, runs)
    assert not runs.exists()
