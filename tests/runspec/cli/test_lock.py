"""`runspec lock`: what it writes, what it prints, how it exits; `apply` holds to it."""

from __future__ import annotations

from pathlib import Path

import pytest

from runspec.cli.apply import apply_command
from runspec.cli.lock import lock_command
from runspec.core.errors import UserError
from runspec.core.spec.load import SpecFiles
from runspec.core.spec.lock_file import read_lock
from tests.runspec.core.spec.spec_files import SPECS, small_spec, write
from tests.runspec.lock.repository import write_model

LOCAL = "model: {hf: policy}"


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is taken from this machine's cache."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "no-cache"))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)


def test_it_writes_a_lock_that_holds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_model(tmp_path / "policy")
    files = SpecFiles(small_spec(tmp_path, LOCAL))
    assert lock_command(files, check=False) == 0
    assert capsys.readouterr().out == f"wrote {tmp_path}/spec.lock.yaml\n"
    assert lock_command(files, check=True) == 0
    assert "holds" in capsys.readouterr().out
    # when the model changes under its name
    (folder / "config.json").write_text("{}")
    assert lock_command(files, check=True) == 1
    assert capsys.readouterr().out.startswith("model: config.json is not the file of the lock")


def test_a_name_that_cannot_be_pinned_leaves_nothing_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = small_spec(tmp_path, "model: {hf: some/model}")
    assert lock_command(SpecFiles(path), check=False) == 1
    said = capsys.readouterr().err
    assert "error: model: the commit of some/model is not known: name it as `revision`" in said
    assert "nothing was written" in said and read_lock(path) is None


def test_what_no_lock_can_hold_is_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_model(tmp_path / "policy")
    web = "data.sources=[{name: web, kind: parquet, uri: 'https://example.org/a.parquet'}]"
    files = SpecFiles(small_spec(tmp_path, LOCAL), overrides=[web])
    assert lock_command(files, check=False) == 0
    assert "warning: data.sources.web: https://example.org" in capsys.readouterr().err


def test_apply_refuses_what_is_not_what_was_locked(tmp_path: Path) -> None:
    # given a lock of the laptop's data, and another data set than it has
    spec = write(
        tmp_path / "spec.yaml",
        f"extends: [{SPECS}/target_short.yaml, {SPECS}/profiles/laptop.yaml]",
    )
    assert lock_command(SpecFiles(spec), check=False) == 0
    other = SpecFiles(spec, overrides=["data.sources.spell_backward.dataset=letter_counting"])
    runs = tmp_path / "runs"
    with pytest.raises(UserError, match=r"letter_counting, and spell_backward in the lock"):
        apply_command(other, True, runs)
    assert not runs.exists()
