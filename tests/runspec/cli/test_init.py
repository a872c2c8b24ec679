"""`runspec init`: what it writes is right at once, and it writes all or nothing."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import jsonschema
import pytest

from runspec.cli.init import MODELINES, SOURCES, initial_files
from runspec.core.spec.load import SpecFiles
from runspec.core.spec.schema_fields import schema_fields
from runspec.core.spec.validate import to_python
from runspec.core.spec.yaml_nodes import parse_yaml
from runspec.lint.check import check_spec
from tests.harness import ROOT
from tests.runspec.cli.in_process import runspec
from tests.runspec.core.spec.spec_files import SPECS

FILES = [
    ".github/workflows/runspec.yaml",
    ".pre-commit-config.yaml",
    "runspec.schema.json",
    "spec.yaml",
]


def written(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def yaml(path: Path) -> object:
    document = parse_yaml(path.read_text(), str(path))
    assert document.findings == []
    assert document.root is not None
    return to_python(document.root)


@pytest.mark.parametrize("source", SOURCES)
def test_what_it_writes_is_clean_and_fits_its_schema(tmp_path: Path, source: str) -> None:
    # given a new project
    done = runspec("init", tmp_path, "--from", source)
    assert (done.returncode, written(tmp_path)) == (0, FILES)
    # then its spec has no finding, and is what editors expect by the schema that it names
    spec = tmp_path / "spec.yaml"
    checked = check_spec(SpecFiles(spec))
    assert checked.findings == []
    assert checked.require().name == source
    assert spec.read_text().startswith(MODELINES)
    for line in MODELINES.splitlines():
        assert (tmp_path / line.rpartition("./")[2]).name == "runspec.schema.json"
    schema = json.loads((tmp_path / "runspec.schema.json").read_text())
    jsonschema.Draft7Validator(schema).validate(yaml(spec))


@pytest.mark.parametrize(
    ("source", "shipped", "profile"),
    [
        ("laptop", "target_short", "laptop"),
        ("target-short", "target_short", None),
        ("target-long", "target_long", None),
    ],
)
def test_it_learns_what_the_shipped_spec_learns(
    source: str, shipped: str, profile: str | None, tmp_path: Path
) -> None:
    # given what init writes, and the shipped spec that it is made after
    runspec("init", tmp_path, "--from", source)
    ours = check_spec(SpecFiles(tmp_path / "spec.yaml")).require()
    theirs = check_spec(SpecFiles(SPECS / f"{shipped}.yaml", profile)).require()
    # then every field that another run would be needed for is the same
    for path, field in schema_fields().items():
        if field.change == "newrun" and "." not in path and path != "name":
            assert getattr(ours, path) == getattr(theirs, path), path


def test_files_that_are_there_stay_unless_forced(tmp_path: Path) -> None:
    # given one file of the four
    (tmp_path / "spec.yaml").write_text("mine\n")
    done = runspec("init", tmp_path)
    assert done.returncode == 2
    assert "already there: spec.yaml" in done.stderr
    assert "--force" in done.stderr
    assert (written(tmp_path), (tmp_path / "spec.yaml").read_text()) == (["spec.yaml"], "mine\n")
    # when it is forced, then all are written
    assert runspec("init", tmp_path, "--force").returncode == 0
    assert written(tmp_path) == FILES


def test_the_workflow_runs_the_command_on_the_spec(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runspec("init", tmp_path)
    workflow = yaml(tmp_path / ".github/workflows/runspec.yaml")
    steps = workflow["jobs"]["lint"]["steps"]  # type: ignore[index]
    command = shlex.split(steps[-1]["run"])
    assert command[0] == "runspec"
    monkeypatch.chdir(tmp_path)
    assert runspec(*command[1:]).returncode == 0


def hooks() -> list[tuple[str, dict[str, str]]]:
    """The hook that the repository offers to others, and the one that init writes."""
    [offered] = yaml(ROOT / ".pre-commit-hooks.yaml")  # type: ignore[misc]
    content = parse_yaml(initial_files("laptop")[".pre-commit-config.yaml"], "config").root
    assert content is not None
    [local] = to_python(content)["repos"][0]["hooks"]
    return [("offered", offered), ("local", local)]


@pytest.mark.parametrize(("name", "hook"), hooks(), ids=[name for name, _ in hooks()])
def test_the_hook_runs_as_pre_commit_runs_it(
    tmp_path: Path, name: str, hook: dict[str, str]
) -> None:
    # given the entry of a hook, with the files of a commit as arguments
    runspec("init", tmp_path)
    program, *arguments = shlex.split(hook["entry"])
    assert (program, hook["id"]) == ("runspec", "runspec-lint")
    # when the spec is right it passes, and when it is not it fails and says where
    for text, code in (("", 0), ("stepz: 3\n", 1)):
        with (tmp_path / "spec.yaml").open("a") as spec:
            spec.write(text)
        done = runspec(*arguments, tmp_path / "spec.yaml")
        assert done.returncode == code, done.stderr
        assert ("unknown-key" in done.stdout) == bool(code)
