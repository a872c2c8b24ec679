"""A spec as the commands that act on runs want it, and placements in a plan."""

from __future__ import annotations

from pathlib import Path

import pytest

from runspec.cli.plan import plan_command
from runspec.cli.spec_files import sound_spec
from runspec.core.errors import BadUsage
from runspec.core.spec.load import SpecFiles
from tests.runspec.core.spec.spec_files import SPECS, small_spec


def test_a_model_beside_the_spec_is_found_from_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # given a spec that names a directory beside it, and a process that runs elsewhere
    (tmp_path / "models" / "mine").mkdir(parents=True)
    path = small_spec(tmp_path, "model: {hf: models/mine}")
    monkeypatch.chdir("/")
    # when it is read for a run
    model = sound_spec(SpecFiles(path)).model
    # then the run has the whole path, and a name that is no directory stays a name
    assert model.hf == str(tmp_path / "models" / "mine")
    pinned = small_spec(tmp_path, f"model: {{hf: some/model, revision: {'a' * 40}}}")
    assert sound_spec(SpecFiles(pinned)).model.hf == "some/model"


def test_a_saved_plan_is_no_spec(tmp_path: Path) -> None:
    # given a plan that was saved
    plan = tmp_path / "x.plan"
    assert (
        plan_command(SpecFiles(SPECS / "target_short.yaml"), plan, True, False, False, tmp_path)
        == 0
    )
    # then it is named as what it is, with what takes it
    with pytest.raises(BadUsage, match="a saved plan") as error:
        sound_spec(SpecFiles(plan))
    assert error.value.remedy == f"`runspec apply {plan}`"


def test_a_file_beside_the_spec_goes_before_one_where_the_command_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # given files of one name beside a spec and where the command runs
    project = tmp_path / "project"
    project.mkdir()
    source = "data: {sources: {x: {kind: jsonl, uri: problems.jsonl}}}"
    path = small_spec(project, source)
    for folder in (project, tmp_path):
        (folder / "problems.jsonl").write_text("")
    monkeypatch.chdir(tmp_path)
    # when the spec is read for a run, then the one beside it is the run's
    assert uri_of(path) == str(project / "problems.jsonl")
    # and without it the other
    (project / "problems.jsonl").unlink()
    assert uri_of(path) == str(tmp_path / "problems.jsonl")


def uri_of(path: Path) -> str | None:
    return next(each for each in sound_spec(SpecFiles(path)).data.sources if each.name == "x").uri
